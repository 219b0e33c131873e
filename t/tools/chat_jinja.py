#!/usr/bin/env python3

"""Renders chat templates with jinja2 and with the program under test, and
compares.  TAP.  Usage: chat_jinja.py PATH-OF-CHAT_TEST; see t/chat_jinja.t.

The environment is set up as Hugging Face's apply_chat_template sets it up:
sandboxed and immutable, trim_blocks and lstrip_blocks, loop controls, a tojson
that keeps keys and characters as they are, raise_exception, strftime_now, and
the generation tag.
"""

import copy
import datetime
import glob
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import warnings

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

warnings.simplefilter('ignore')

HERE = os.path.dirname(os.path.abspath(__file__))
TEMPLATES = os.path.join(HERE, '..', 'golden', 'templates')


class Generation(Extension):
    tags = {'generation'}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(['name:endgeneration'],
                                       drop_needle=True)
        call = self.call_method('_show', [])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _show(self, caller):
        return caller()


def tojson(value, ensure_ascii=False, indent=None, separators=None,
           sort_keys=False):
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent,
                      separators=separators, sort_keys=sort_keys)


def raise_exception(message):
    raise TemplateError(message)


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True,
        extensions=[Generation, loopcontrols])
    env.filters['tojson'] = tojson
    env.globals['raise_exception'] = raise_exception
    env.globals['strftime_now'] = \
        lambda form: datetime.datetime.now().strftime(form)
    return env


def reference(env, case):
    """The text, or None and the error."""
    case = copy.deepcopy(case)
    values = {'tools': None, 'documents': None}
    values.update(case.get('kwargs') or {})
    if case.get('tools') is not None:
        values['tools'] = case['tools']
    for name in 'messages', 'bos_token', 'eos_token':
        if name in case:
            values[name] = case[name]
    values['add_generation_prompt'] = case.get('add_generation_prompt', False)
    try:
        return env.from_string(case['template']).render(**values), None
    except Exception as error:
        return None, error


def tested(program, cases):
    with tempfile.NamedTemporaryFile('w', suffix='.json') as file:
        json.dump(cases, file)
        file.flush()
        done = subprocess.run([program, '--render', file.name],
                              capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.split('\n') if line]


def read(name):
    with open(os.path.join(TEMPLATES, name), newline='',
              encoding='utf-8') as file:
        return file.read()


def conversations():
    tools = json.loads(read('tools.json'))
    for chat in json.loads(read('conversations.json')):
        chat = dict(chat)
        chat['tools'] = tools.get(chat.get('tools'))
        chat.setdefault('add_generation_prompt', True)
        chat.update(bos_token='<s>', eos_token='</s>')
        yield chat.pop('name'), chat


def template_cases():
    names = sorted(os.path.basename(path)
                   for path in glob.glob(os.path.join(TEMPLATES, '*.jinja')))
    for name in names:
        for title, chat in conversations():
            yield f'{name}: {title}', dict(chat, template=read(name))


def expression_cases():
    chat = {
        'messages': [
            {'role': 'system', 'content': ' sys '},
            {'role': 'user', 'content': 'Hëllo  <b>\n'},
            {'role': 'assistant', 'content': 'hi', 'tool_calls': [
                {'function': {'name': 'f', 'arguments': {
                    'a': 1, 'b': [1.5, None, True, 'x\n"']}}}]}],
        'bos_token': '<s>', 'kwargs': {'kw': 'v', 'items': [3, 1, 2]}}
    for at, text in enumerate(read('expressions.txt').split('\n====\n')):
        yield f'expression {at + 1}', dict(chat, template=text)


def model_case():
    """The template inside the model file, found by its metadata key."""
    path = os.environ.get('LLM_TEST_MODEL')
    if not path or not os.path.exists(path):
        return
    with open(path, 'rb') as file:
        head = file.read(16 << 20)
    key = b'tokenizer.chat_template'
    at = head.find(struct.pack('<Q', len(key)) + key)
    if at < 0:
        return
    at += 8 + len(key)
    kind, size = struct.unpack_from('<IQ', head, at)
    assert kind == 8, 'the template is a string'
    text = head[at + 12:at + 12 + size].decode()
    for title, chat in conversations():
        yield f'model: {title}', dict(chat, template=text)


# --- templates by chance: whitespace control and control flow ---

SPACE = ['', ' ', '\n', '  ', '\n\n', ' \n ', '\t', 'x', '\r\n', 'y z', '}',
         '{', ' a\n', '\n  ']
ATOMS = ['1', '2.5', '0', '"ab"', "''", 'true', 'none', 's', 'l', 'd', 'u',
         'l[0]', 'd.a', 's[1:]', 's[::-1]', 'l|length', 's|upper', 's.split()',
         'f(1)', 'f("z", b=2)', 'ns.q', '[3, 1]|sort', 'd|tojson',
         'l|join("-")', 's.replace("a", "b")', 'd.items()|list', '"é" * 2']
BETWEEN = [' + ', ' ~ ', ' == ', ' != ', ' and ', ' or ', ' in ', ' * ',
           ' < ', ' - ', ' // ', ' % ']
BEHIND = ['|length', '|string', '|default("q")', '|list', '|first', '|last',
          '|trim', '|tojson', '|int', '|title', '|replace("a", "o")', '[0]',
          '[-1]', '[1:]', '.a', '["a"]', '.strip()', ' is defined',
          ' is string', ' is none', ' is mapping', ' is not number']


class Chance:
    def __init__(self, seed):
        self.random = random.Random(seed)

    def pick(self, items):
        return self.random.choice(items)

    def space(self):
        return ''.join(self.pick(SPACE)
                       for _ in range(self.random.randint(0, 3)))

    def tag(self, body):
        return ('{%' + self.pick(['', '', '-', '+']) + ' ' + body + ' '
                + self.pick(['', '', '-', '+']) + '%}')

    def expression(self, depth=0):
        kind = self.random.random()
        if depth > 2 or kind < 0.4:
            return self.pick(ATOMS)
        if kind < 0.6:
            return (self.expression(depth + 1) + self.pick(BETWEEN)
                    + self.expression(depth + 1))
        if kind < 0.7:
            return '(' + self.expression(depth + 1) + ')'
        if kind < 0.75:
            return (self.expression(depth + 1) + ' if '
                    + self.expression(depth + 1) + ' else '
                    + self.expression(depth + 1))
        return '(' + self.expression(depth + 1) + ')' + self.pick(BEHIND)

    def body(self, depth):
        return ''.join(self.statement(depth)
                       for _ in range(self.random.randint(0, 3)))

    def statement(self, depth=0):
        kind = self.random.random()
        if depth > 2 or kind < 0.2:
            return self.space()
        if kind < 0.5:
            return (self.space() + '{{' + self.pick(['', '', '-', '+']) + ' '
                    + self.expression() + ' ' + self.pick(['', '-']) + '}}'
                    + self.space())
        if kind < 0.6:
            return self.tag('set x = ' + self.expression()) + self.space()
        if kind < 0.65:
            return (self.space() + '{#' + self.pick(['', '-', '+']) + ' c '
                    + self.pick(['', '-', '+']) + '#}' + self.space())
        if kind < 0.78:
            return (self.space() + self.tag('if ' + self.expression())
                    + self.body(depth + 1)
                    + self.pick(['', self.tag('else') + self.body(depth + 1)])
                    + self.tag('endif') + self.space())
        if kind < 0.9:
            return (self.space() + self.tag('for x in ' + self.expression())
                    + self.body(depth + 1) + self.tag('endfor')
                    + self.space())
        if kind < 0.95:
            return (self.tag('set x') + self.body(depth + 1)
                    + self.tag('endset') + '{{ x }}')
        return (self.space() + self.tag('raw') + self.space() + '{{ }}'
                + self.tag('endraw') + self.space())

    def template(self):
        return ('{% set ns = namespace(q=0) %}'
                '{% macro f(a, b=3) %}{{ a }}{{ b }}{% endmacro %}'
                + self.body(0) + self.statement())


def random_cases(seed, count):
    chance = Chance(seed)
    for _ in range(count):
        yield 'random', {
            'template': chance.template(), 'messages': [],
            'kwargs': {'l': [1, 'a', None, 2.5], 'd': {'a': 1, 'b': 'zz'},
                       's': ' héllo Wörld\n ab'}}


class Tap:
    def __init__(self):
        self.count = self.failed = 0

    def ok(self, good, name, *notes):
        self.count += 1
        self.failed += not good
        print('ok' if good else 'not ok', self.count, '-', name)
        if not good:
            for note in notes:
                print('#   ' + repr(note))

    def finish(self):
        print(f'1..{self.count}')
        return 1 if self.failed else 0


def agree(expected, error, answer):
    """The same text; or both refuse, raise_exception in the same words."""
    if error is None:
        return answer.get('text') == expected
    if type(error) is TemplateError:
        return answer.get('error') == str(error)
    return 'error' in answer


def main():
    program, env, tap = sys.argv[1], environment(), Tap()
    named = [*template_cases(), *expression_cases(), *model_case()]
    answers = tested(program, [case for _, case in named])

    assert len(answers) == len(named) > 200

    for (name, case), answer in zip(named, answers):
        expected, error = reference(env, case)

        if not agree(expected, error, answer):
            # the date may have changed in between
            answer = tested(program, [case])[0]
            expected, error = reference(env, case)

        tap.ok(agree(expected, error, answer), name, case['template'][:500],
               expected if error is None else error, answer)

    # What jinja2 refuses by chance we may understand, but never the reverse.
    seed = int(os.environ.get('LLM_TEST_SEED', random.randrange(1 << 30)))
    cases = list(random_cases(seed, 4000 if os.environ.get('LLM_TEST_LONG')
                              else 1000))
    wrong, rendered = [], 0

    print(f'# seed {seed}')

    for (_, case), answer in zip(cases, tested(program,
                                               [case for _, case in cases])):
        expected, error = reference(env, case)
        rendered += error is None

        if error is None and answer.get('text') != expected:
            wrong.append((case['template'], expected, answer))

    tap.ok(not wrong, f'{len(cases)} templates by chance, seed {seed}',
           *wrong[:5])
    tap.ok(rendered > len(cases) // 4, 'enough of them are proper templates',
           rendered)

    return tap.finish()


sys.exit(main())
