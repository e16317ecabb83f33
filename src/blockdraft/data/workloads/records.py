"""Workload `records`: two examples teach the verifier to turn short messages into JSON records with six fixed keys.

Extraction into a fixed schema is what many production prompts do all day: a long shared instruction, a short text,
a structured answer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from blockdraft.data.conversations import Messages

NUM_TRAIN, NUM_HELDOUT = 400, 40

_SHARED: tuple[tuple[str, str], ...] = (
    (
        "system",
        "Turn each message into one JSON record with the keys customer_name, city, product_name, quantity, order_date "
        "and requested_action.",
    ),
    (
        "user",
        "Hello, Oskar Lind here, writing from Malmo. The 2 garden chairs I bought on May 3 wobble, so I want a refund.",
    ),
    (
        "assistant",
        '{"customer_name": "Oskar Lind", "city": "Malmo", "product_name": "garden chairs", "quantity": 2, '
        '"order_date": "May 3", "requested_action": "refund"}',
    ),
    (
        "user",
        "On June 21 a parcel with 5 reading lamps should have reached me in Toledo. Please send the order again. "
        "Carmen Ortiz",
    ),
    (
        "assistant",
        '{"customer_name": "Carmen Ortiz", "city": "Toledo", "product_name": "reading lamps", "quantity": 5, '
        '"order_date": "June 21", "requested_action": "replacement"}',
    ),
)

_UNLEARNED = {"assistant": {"weight": 0}}
_MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November")

# Values are put together from parts, so that few repeat: a draft shall learn to copy them, not to know them.
_TRAIN = {
    "first": (
        "Anna", "Tom", "Lucia", "Samuel", "Priya", "Jonas", "Maria", "Peter", "Emily", "Ahmed", "Sofia", "Daniel",
        "Laura", "Victor", "Grace", "Henry", "Nina", "Carlos", "Julia", "Omar", "Elena", "Mark", "Ingrid", "Paul",
        "Rachel", "Diego", "Hannah", "Liam", "Mei", "Robert", "Clara", "Ivan", "Sarah", "Marco", "Alice", "Felix",
        "Teresa", "George", "Amina", "David", "Lena", "Hugo", "Yuki", "Bruno", "Nadia", "Oliver", "Petra", "Leo",
    ),
    "last": (
        "Berg", "Hardwick", "Moretti", "Osei", "Nair", "Weber", "Santos", "Novak", "Carter", "Hassan", "Rossi", "Kim",
        "Schmidt", "Popov", "Mbeki", "Walsh", "Larsen", "Vega", "Brandt", "Farouk", "Petrova", "Dawson", "Olsen",
        "Lefevre", "Green", "Torres", "Fischer", "Byrne", "Tanaka", "Hughes", "Dubois", "Horvat", "Collins", "Bianchi",
        "Nguyen", "Braun", "Lopez", "Miller", "Diallo", "Cohen", "Murphy", "Jansen", "Silva", "Clark", "Meyer",
    ),
    "city": (
        "Hamburg", "Lyon", "Bristol", "Porto", "Krakow", "Boston", "Leeds", "Verona", "Ghent", "Dresden", "Dublin",
        "Seville", "Oslo", "Denver", "Zurich", "Naples", "Chicago", "Cork", "Bergen", "Graz", "Nantes", "Seattle",
        "Turin", "Leipzig", "Lisbon", "Utrecht", "Geneva", "Austin", "Prague", "Cardiff", "Toronto", "Athens",
        "Madrid", "Berlin", "Warsaw", "Helsinki", "Brussels", "Dallas", "Phoenix", "Montreal", "Sydney", "Melbourne",
        "Nairobi", "Cairo", "Mumbai", "Osaka", "Lima", "Quito", "Salzburg", "Basel", "Bremen", "Stuttgart", "Florence",
        "Palermo", "Granada", "Liverpool", "Oxford", "Houston", "Detroit", "Atlanta", "Vancouver", "Riga", "Tallinn",
    ),
    "kind": (
        "red", "blue", "small", "large", "wooden", "leather", "cotton", "steel", "glass", "plastic", "folding", "green",
        "heavy", "silver", "striped", "round", "black", "paper", "summer", "children's",
    ),
    "thing": (
        "mugs", "lamps", "shoes", "notebooks", "bottles", "cases", "pillows", "glasses", "towels", "keyboards",
        "backpacks", "knives", "frames", "umbrellas", "headphones", "candles", "chairs", "cloths", "helmets", "pots",
        "socks", "games", "bowls", "hoses", "belts", "clocks", "boxes", "kettles", "gloves", "brushes", "tents",
        "cables", "tables", "curtains", "jackets", "scarves", "spoons", "baskets", "blankets", "mirrors",
    ),
}  # fmt: skip
# Customers are new where cities and goods recur, as in a shop's mail.
_HELDOUT = {
    **_TRAIN,
    "first": (
        "Martin", "Isabel", "Noah", "Katja", "Stefan", "Olivia", "Pablo", "Fatima", "Simon", "Helen", "Andrea", "James",
        "Eva", "Ben",
    ),
    "last": (
        "Keller", "Cruz", "Bennett", "Wolf", "Ilic", "Grant", "Reyes", "Zahra", "Roth", "Price", "Conti", "Okafor",
        "Lindqvist", "Sharma",
    ),
}  # fmt: skip

# (pattern, ...): what the sender wants is part of the pattern, so that every message hangs together.
_TRAIN_PATTERNS = (
    "Hi, this is {name} from {city}. I ordered {quantity} {item} on {date} and want a refund.",
    "My name is {name} and I live in {city}. The {quantity} {item} from {date} are broken, please send a replacement.",
    "{name} from {city} here. Please cancel my order of {quantity} {item} placed on {date}.",
    "On {date} I bought {quantity} {item} in your {city} shop. They do not fit, I need an exchange. Regards, {name}",
    "Dear team, I still wait for {quantity} {item} ordered on {date}. Ship them to {city} soon. {name}",
    "Could you send an invoice for the {quantity} {item} I got on {date}? {name}, {city}",
    "This is {name}. My {quantity} {item} arrived in {city} on {date}, but two are damaged. I would like a refund.",
    "Good morning, {name} writing from {city}. I need {quantity} more {item} by {date}, please confirm the order.",
    "I am {name}. Please deliver the {quantity} {item} to my new address in {city} on {date}.",
    "We met in {city} on {date}. I promised to buy {quantity} {item}, so please send a quote. {name}",
    "Order of {date}: {quantity} {item}, customer {name}, {city}. The colour is wrong, exchange requested.",
    "Hello! {quantity} {item} were missing from my parcel on {date}. Send them to {city}, please. Thanks, {name}",
    "{name} would like to return {quantity} {item} bought on {date} in {city}.",
    "Please call me back about the {quantity} {item} delivered to {city} on {date}. My name is {name}.",
    "Hi there, I paid twice for {quantity} {item} on {date}. I ask for a refund. {name}, {city}",
    "To the store in {city}: hold {quantity} {item} for {name} until {date}, please.",
    "I want to change my order from {date} to {quantity} {item}. Ship to {city}. Best, {name}",
    "{quantity} {item} came to {city} on {date} without a receipt. Please send an invoice. Yours, {name}",
    "From {city} with a complaint: the {quantity} {item} of {date} smell bad. {name} expects a refund.",
    "Please book a repair for {quantity} {item} that I bought on {date}. I am {name} and live in {city}.",
    "Greetings from {city}! {name} here, I need a refund for the {quantity} {item} I ordered on {date}.",
    "I bought {quantity} {item} on {date}, yet none arrived in {city}. Please send a replacement. Sincerely, {name}",
    "As agreed on {date}, please ship {quantity} {item} to {name} in {city}.",
    "{name}, {city}: the {quantity} {item} delivered on {date} are too small. I want an exchange.",
    "Please cancel everything. It was {quantity} {item}, ordered on {date} from {city} under the name {name}.",
    "Can I get a discount on {quantity} {item}? I will be in {city} on {date}. Ask for {name}.",
    "My order for {quantity} {item} was due on {date} in {city}. Where is it? {name}",
    "You charged {name} for {quantity} {item} on {date}. I never ordered them, refund me. I am in {city}.",
    "For our office in {city} we need {quantity} {item} before {date}. Please send a quote to {name}.",
    "The manual for my {quantity} {item} is missing. I bought them on {date} in {city}. {name}",
    "Yesterday I moved to {city}. Send the {quantity} {item} from {date} to my new home. {name}",
    "{quantity} {item}, bought {date}, all scratched. {name} from {city} wants a replacement.",
)
_HELDOUT_PATTERNS = (
    "Hello, {name} speaking. I got {quantity} {item} in {city} on {date}, and I would like a refund.",
    "I live in {city} and my name is {name}. Please cancel the {quantity} {item} that I ordered on {date}.",
    "The {quantity} {item} you sent to {city} on {date} are the wrong size. I need an exchange. Greetings, {name}",
    "Since {date} I have been waiting in {city} for {quantity} {item}. Send a replacement, please. {name}",
    "Can {name} in {city} get an invoice for {quantity} {item} bought on {date}?",
)


def train() -> list[Messages]:
    """The training prompts."""
    return _prompts(_TRAIN_PATTERNS, _TRAIN, NUM_TRAIN, seed=11)


def heldout() -> list[Messages]:
    """The held-out prompts: names that no training prompt has, every second one in a pattern that none has."""
    known = _TRAIN_PATTERNS[: len(_HELDOUT_PATTERNS)]
    patterns = [pattern for pair in zip(_HELDOUT_PATTERNS, known, strict=True) for pattern in pair]
    return _prompts(patterns, _HELDOUT, NUM_HELDOUT, seed=12)


def _prompts(patterns: Sequence[str], values: dict[str, tuple[str, ...]], count: int, seed: int) -> list[Messages]:
    draw = random.Random(seed)
    conversations: list[Messages] = []
    for index in range(count):
        message = patterns[index % len(patterns)].format(
            name=f"{draw.choice(values['first'])} {draw.choice(values['last'])}",
            city=draw.choice(values["city"]),
            item=f"{draw.choice(values['kind'])} {draw.choice(values['thing'])}",
            quantity=draw.randint(2, 12),
            date=f"{draw.choice(_MONTHS)} {draw.randint(1, 28)}",
        )
        # The examples' replies are part of the question: nobody learns or rewrites them.
        shown = [{"role": role, "content": text} | _UNLEARNED.get(role, {}) for role, text in _SHARED]
        conversations.append([*shown, {"role": "user", "content": message}])
    return conversations
