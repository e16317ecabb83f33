"""Made-up pairs of a venue's facts and a sentence about it: text for a small encoder-decoder model to learn.

    name[The Amber Fox], kind[bakery], area[harbour], price[low]  ->  The Amber Fox is a cheap bakery at the harbour.

Names are put together from parts, so that they must be copied and cannot be supervised by heart.
"""

from __future__ import annotations

import random

Pair = tuple[str, str]

COLOURS = (
    "Amber", "Copper", "Crimson", "Golden", "Green", "Grey", "Ivory", "Jade", "Olive", "Orange", "Pale", "Pearl",
    "Plum", "Purple", "Red", "Rose", "Ruby", "Rusty", "Silver", "Violet", "White", "Yellow", "Blue", "Black",
    "Indigo", "Scarlet",
)  # fmt: skip
THINGS = (
    "Anchor", "Badger", "Barrel", "Bell", "Bridge", "Candle", "Clock", "Compass", "Crown", "Drum", "Falcon",
    "Feather", "Fiddle", "Fox", "Garden", "Hare", "Harp", "Heron", "Kettle", "Kite", "Lantern", "Lark", "Ladder",
    "Maple", "Moth", "Otter", "Oyster", "Paddle", "Raven", "Shell", "Spoon", "Stag", "Swan", "Thistle", "Wagon",
    "Wren",
)  # fmt: skip
KINDS = ("bakery", "bookshop", "brewery", "cinema", "coffee bar", "gallery", "hotel", "noodle house", "theatre")
AREAS = {"harbour": "at the harbour", "old town": "in the old town", "hill": "on the hill",
         "west end": "in the west end", "canal": "by the canal", "market square": "on the market square"}  # fmt: skip
PRICES = {"low": "cheap", "medium": "fairly priced", "high": "expensive"}
RATINGS = {"poor": "a poor rating", "average": "an average rating", "good": "a good rating", "top": "a top rating"}
DOGS = {"yes": "Dogs are welcome.", "no": "Dogs have to stay outside."}
HOURS = {"morning": "It opens in the morning only.", "late": "It stays open until late at night.",
         "weekend": "It is open at the weekend."}  # fmt: skip


def _name(draw: random.Random) -> str:
    return f"The {draw.choice(COLOURS)} {draw.choice(THINGS)}"


def _facts(draw: random.Random) -> dict[str, str]:
    """Name, kind and a few of the other facts, in this order."""
    others = {"area": draw.choice(list(AREAS)), "price": draw.choice(list(PRICES)),
              "rating": draw.choice(list(RATINGS)), "near": _name(draw),
              "hours": draw.choice(list(HOURS)), "dogs": draw.choice(list(DOGS))}  # fmt: skip
    kept = set(draw.sample(list(others), draw.randint(2, 5)))
    return {"name": _name(draw), "kind": draw.choice(KINDS), **{k: v for k, v in others.items() if k in kept}}


def _article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _sentence(facts: dict[str, str], pattern: int) -> str:
    """A text about the facts in one of three patterns."""
    described = f"{PRICES[facts['price']]} {facts['kind']}" if "price" in facts else facts["kind"]
    place = f" {AREAS[facts['area']]}" if "area" in facts else ""
    near = f", close to {facts['near']}" if "near" in facts else ""
    rating = f" with {RATINGS[facts['rating']]}" if "rating" in facts else ""
    if pattern == 0:
        first = f"{facts['name']} is {_article(described)}{place}{rating}{near}."
    elif pattern == 1:
        first = f"There is {_article(described)} called {facts['name']}{place}{near}."
        first += f" It has {RATINGS[facts['rating']]}." if rating else ""
    else:
        first = f"If you look for {_article(described)}{place}, try {facts['name']}{near}."
        first += f" Guests give it {RATINGS[facts['rating']]}." if rating else ""
    ends = [table[facts[key]] for key, table in (("hours", HOURS), ("dogs", DOGS)) if key in facts]
    return " ".join([first, *ends])


def venue_pairs(count: int, seed: int) -> list[Pair]:
    """Pairs of source and target; the pattern of a sentence follows from its first facts, as habits of writers do."""
    draw = random.Random(seed)
    pairs = []
    for _ in range(count):
        facts = _facts(draw)
        pattern = (len(facts) + KINDS.index(facts["kind"])) % 3
        pairs.append((", ".join(f"{key}[{value}]" for key, value in facts.items()), _sentence(facts, pattern)))
    return pairs
