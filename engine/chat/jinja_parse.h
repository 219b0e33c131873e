/*
 * The tree of a chat template.
 *
 * One node type for statements and expressions; what its fields hold stands
 * beside each kind.  The tree and its strings live in the arena it was parsed
 * into, are never written again, and may be evaluated by many runs.
 */

#ifndef ENGINE_CHAT_JINJA_PARSE_H
#define ENGINE_CHAT_JINJA_PARSE_H

#include "engine/chat/jinja_value.h"

enum {
    JINJA_MAX_TREE = 200, /* depth of the tree */
};

typedef enum {
    /* expressions */
    N_CONST,  /* constant */
    N_NAME,   /* name */
    N_ATTR,   /* a.name */
    N_ITEM,   /* a[b] */
    N_SLICE,  /* a[b:c:d], each but a may be NULL */
    N_CALL,   /* a(kids) */
    N_FILTER, /* a|row(kids); row NULL: unknown, fails when it runs */
    N_TEST,   /* a is row(kids) */
    N_NOT,    /* not a */
    N_NEG,    /* -a */
    N_POS,    /* +a */
    N_AND,    /* a and b */
    N_OR,     /* a or b */
    N_BINARY, /* a op b */
    N_CHAIN,  /* a < b < c: kids are N_ARG, each with its op */
    N_IF,     /* a if b else c (NULL) */
    N_LIST,   /* [kids] */
    N_TUPLE,  /* (kids) */
    N_DICT,   /* {kids[0]: kids[1], …} */
    N_ARG,    /* name=a in a call */
    N_STAR,   /* *a in a call */
    N_STARS,  /* **a in a call */
    /* statements */
    N_TEXT,        /* constant */
    N_OUTPUT,      /* {{ a }} */
    N_BODY,        /* kids */
    N_BRANCHES,    /* kids are N_BRANCH, c the else body */
    N_BRANCH,      /* if a then b */
    N_FOR,         /* for a in b if c: d; else e; name is "loop" */
    N_SET,         /* set a = b */
    N_SETBLOCK,    /* set a: b; filters c over a N_CAPTURED */
    N_MACRO,       /* macro name(kids: N_PARAM): b; c, d, e are the N_NAMEs
                   varargs, kwargs, caller */
    N_PARAM,       /* name = a (NULL) */
    N_CALLBLOCK,   /* call: b is the macro (a N_MACRO), a the call */
    N_FILTERBLOCK, /* b captured, c the filters over a N_CAPTURED */
    N_WITH,        /* kids are N_SET, b the body */
    N_SCOPE,       /* b in a scope of its own: generation */
    N_BREAK,
    N_CONTINUE,
    N_CAPTURED, /* what the filter of a block filters */
} node_kind_t;

/* Comparison operators beyond the tokens' own */
enum {
    OP_IN = 100,
    OP_NOT_IN = 101,
};

/* Interned: one pointer per spelling and template. */
typedef struct jname_s {
    struct jname_s *next;
    jstr_t text;
} jname_t;

struct node_s {
    uint8_t kind;
    uint8_t op;
    bool flag; /* N_MACRO: it uses varargs or kwargs */
    uint16_t depth;
    uint32_t line;
    node_t *a, *b, *c, *d, *e;
    node_t **kids;
    size_t n_kids;
    jname_t *name;
    const jrow_t *row;
    jv_t constant;
    jstr_t text; /* what constant.str points to */
};


/* Parses a template into arena.  LLM_BADREQ with line and cause. */
int jinja_parse(arena_t *arena, const char *source, size_t len, node_t **root,
                llm_err_t *err);

#endif /* ENGINE_CHAT_JINJA_PARSE_H */
