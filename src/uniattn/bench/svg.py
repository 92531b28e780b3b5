"""The little SVG that the plots need: elements as text, and scales with round ticks."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass


def element(tag: str, *children: str, **attributes: object) -> str:
    """One element. Attribute names take `_` for `-`, and a trailing `_` where Python keeps the word; None is left out."""
    parts = [tag]
    for name, value in attributes.items():
        if value is not None:
            text = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
            parts.append(f'{name.rstrip("_").replace("_", "-")}="{html.escape(text)}"')
    return f"<{' '.join(parts)}>{''.join(children)}</{tag}>"


def text(x: float, y: float, words: str, **attributes: object) -> str:
    """Words at a point."""
    return element("text", html.escape(words), x=float(x), y=float(y), **attributes)


def title(words: str) -> str:
    """What a browser shows when the pointer rests on the parent element."""
    return element("title", html.escape(words))


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), **attributes)


def polyline(points: list[tuple[float, float]], **attributes: object) -> str:
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", **attributes)


def drawing(width: int, height: int, *children: str, label: str) -> str:
    """A drawing that grows with the page; `label` is what a screen reader says."""
    size = f"0 0 {width} {height}"
    return element("svg", *children, xmlns="http://www.w3.org/2000/svg", viewBox=size, role="img", aria_label=label)


@dataclass(frozen=True)
class Log:
    """A logarithmic scale from `[low, high]` to the pixels `[begin, end]`."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low) if self.high > self.low else 0.5
        return self.begin + share * (self.end - self.begin)

    def ticks(self) -> list[float]:
        """Powers of ten inside; where these are fewer than three, multiples of them as well."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        found: list[float] = []
        for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
            found = [s * 10.0**e for e in range(first, last + 1) for s in steps if self.low <= s * 10.0**e <= self.high * 1.0001]
            if len(found) >= 3:
                break
        return found


def padded(low: float, high: float, share: float = 0.06) -> tuple[float, float]:
    """The range with `share` of its logarithmic length added at both ends, so that no point lies on an axis."""
    factor = max(high / low, 1.5) ** share
    return low / factor, high * factor


def short(value: float) -> str:
    """A number on an axis: 512, 8k, 128k, 2M; powers of two as binary thousands."""
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if value >= unit and value % unit == 0:
            return f"{value / unit:g}{letter}"
    return f"{value:,.0f}" if value >= 10 else f"{value:g}"
