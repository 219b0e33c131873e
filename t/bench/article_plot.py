"""Plots as SVG text: lines and bars, readable on light and dark ground."""

import math
from html import escape

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 76, 52
COLOURS = ("#3584c8", "#e07b25", "#3c9c62", "#a565c0", "#c84a5a", "#8a8a3a")
STYLE = """
text { font: 13px sans-serif; fill: #333 }
.title { font-size: 16px; font-weight: bold }
.grid { stroke: #888; stroke-opacity: .3 }
.axis { stroke: #888 }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }
"""


def ticks(low, high, n=5):
    """Round numbers that cover low … high."""
    span = high - low or 1
    step = 10 ** math.floor(math.log10(span / n))
    for factor in (1, 2, 5, 10):
        if span / (step * factor) <= n:
            step *= factor
            break
    first = math.floor(low / step)
    last = math.ceil(high / step - 1e-9)
    return [step * i for i in range(first, last + 1)]


def powers(low, high):
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high) - 1e-9), first + 1)
    return [10.0 ** i for i in range(first, last + 1)]


def number(value):
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


class Canvas:
    def __init__(self, title, x_label, y_label):
        self.parts = []
        self.text(WIDTH / 2, 22, title, "middle", "title")
        if x_label:
            self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label)
        middle = (TOP + HEIGHT - BOTTOM) / 2
        self.parts.append(
            f'<text transform="translate(18 {middle:.0f}) rotate(-90)" '
            f'text-anchor="middle">{escape(y_label)}</text>')

    def text(self, x, y, text, anchor="middle", kind=None):
        kind = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{kind} '
                          f'text-anchor="{anchor}">{escape(str(text))}</text>')

    def line(self, x1, y1, x2, y2, kind):
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" '
                          f'y2="{y2:.1f}" class="{kind}"/>')

    def rect(self, x, y, w, h, colour):
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" '
                          f'height="{max(h, 0.5):.1f}" fill="{colour}"/>')

    def legend(self, names):
        x = LEFT
        for name, colour in zip(names, COLOURS):
            self.rect(x, 40, 14, 14, colour)
            self.text(x + 20, 52, name, "start")
            x += 40 + 7.2 * len(name)

    def y_axis(self, values, log):
        """The function from a value to its height, with grid and labels."""
        high = max(values, default=1) or 1
        low = min((v for v in values if v > 0), default=1) if log else 0
        marks = powers(low, high) if log else ticks(0, high)
        kind = math.log10 if log else float
        first, last = kind(marks[0]), kind(marks[-1])

        def place(value):
            part = (kind(max(value, marks[0])) - first) / (last - first)
            return HEIGHT - BOTTOM - part * (HEIGHT - BOTTOM - TOP)

        for mark in marks:
            self.line(LEFT, place(mark), WIDTH - RIGHT, place(mark), "grid")
            self.text(LEFT - 8, place(mark) + 4, number(mark), "end")
        self.line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, "axis")
        self.line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "axis")
        return place

    def done(self):
        return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} '
                f'{HEIGHT}" width="{WIDTH}" height="{HEIGHT}">\n'
                f'<style>{STYLE}</style>\n' + "\n".join(self.parts)
                + "\n</svg>\n")


def line_plot(title, x, y, series, log=False):
    """series: [(name, [(x, y), …]), …]."""
    canvas = Canvas(title, x, y)
    points = [p for _, line in series for p in line]
    marks = ticks(min((p[0] for p in points), default=0),
                  max((p[0] for p in points), default=1))
    height = canvas.y_axis([p[1] for p in points], log)

    def place(value):
        part = (value - marks[0]) / (marks[-1] - marks[0])
        return LEFT + part * (WIDTH - RIGHT - LEFT)

    for mark in marks:
        canvas.text(place(mark), HEIGHT - BOTTOM + 18, number(mark))
    for (_, line), colour in zip(series, COLOURS):
        path = " ".join(f"{place(a):.1f},{height(b):.1f}" for a, b in line)
        canvas.parts.append(f'<polyline points="{path}" fill="none" '
                            f'stroke="{colour}" stroke-width="2"/>')
    canvas.legend([name for name, _ in series])
    return canvas.done()


def bar_plot(title, y, groups, series, log=False):
    """series: [(name, [a value for each group]), …]."""
    canvas = Canvas(title, "", y)
    height = canvas.y_axis([v for _, values in series for v in values], log)
    room = (WIDTH - RIGHT - LEFT) / len(groups)
    width = min(room * 0.8 / len(series), 80)

    for g, group in enumerate(groups):
        middle = LEFT + room * (g + 0.5)
        canvas.text(middle, HEIGHT - BOTTOM + 20, group)
        for i, (_, values) in enumerate(series):
            left = middle + (i - len(series) / 2) * width
            top = height(values[g])
            canvas.rect(left + 2, top, width - 4, HEIGHT - BOTTOM - top,
                        COLOURS[i])
            canvas.text(left + width / 2, top - 5, f"{values[g]:.3g}")
    canvas.legend([name for name, _ in series])
    return canvas.done()


KINDS = {"line": line_plot, "bars": bar_plot}
