"""Workload `chat`: short questions, arithmetic, small code, rewriting and lists, a few hundred prompts.

Free text is the hard case for a draft; it stands beside `records` so that nobody takes one number for the other.
"""

from __future__ import annotations

from blockdraft.data.conversations import Messages

_Templates = tuple[tuple[str, ...], tuple[str, ...]]  # patterns with one {}, values for it

_QUESTIONS: _Templates = (
    (
        "What is {}?",
        "Explain {} in two sentences.",
        "Why does {} matter?",
        "How would you describe {} to a child?",
    ),
    (
        "photosynthesis", "gravity", "a prime number", "inflation", "the water cycle", "a black hole", "democracy",
        "an algorithm", "evolution", "electricity", "a virus", "the moon", "recycling", "a computer network",
        "the ozone layer", "a market economy", "friction", "a haiku", "the printing press", "sleep",
    ),
)  # fmt: skip
_REWRITES: _Templates = (
    (
        "Rewrite this sentence politely: {}",
        "Correct the grammar of this sentence: {}",
        "Rewrite this sentence in the past tense: {}",
    ),
    (
        "Send me the report now.", "The dog are barking at the mailman.", "She go to school every day.",
        "You forgot my order again.", "They plays football in the park.", "Give me your phone number.",
        "He don't like the cold soup.", "We is leaving early tomorrow.", "Move your car, it blocks my door.",
        "The train arrive late every morning.", "I needs more time for the exam.", "Stop talking during the film.",
        "The children eats their lunch outside.", "Tell me why you are late.", "My friend speak three languages.",
        "The shop close at nine in the evening.", "Fix this bug before you go home.", "Birds flies south in winter.",
    ),
)  # fmt: skip
_LISTS: _Templates = (
    ("List five {}.", "Name three {} and say one thing about each.", "Give me a numbered list of four {}."),
    (
        "fruits", "European capitals", "musical instruments", "kinds of weather", "farm animals", "planets",
        "winter sports", "vegetables", "kitchen tools", "rivers", "programming languages", "board games", "trees",
        "means of transport", "breakfast dishes", "garden flowers", "school subjects", "sea animals",
    ),
)  # fmt: skip
_CODE: _Templates = (
    ("Write a Python function that {}.", "Write a short Python program that {} and prints the result."),
    (
        "adds two numbers", "reverses a string", "finds the largest number in a list", "counts the vowels in a word",
        "checks whether a number is even", "computes the factorial of n", "removes duplicates from a list",
        "converts Celsius to Fahrenheit", "sums the digits of a number", "checks for a palindrome",
        "sorts a list of names", "counts the words in a sentence", "finds all prime numbers below n",
        "merges two dictionaries", "computes the average of a list", "reads a file line by line",
    ),
)  # fmt: skip

_HELDOUT = (
    "What is a volcano?",
    "Explain the seasons in two sentences.",
    "Why does exercise matter?",
    "Can you tell me what a neural network is?",
    "What happens when water freezes?",
    "Rewrite this sentence politely: Close the window.",
    "Correct the grammar of this sentence: The cats is sleeping on the sofa.",
    "Rewrite this sentence in the past tense: He walks to the station.",
    "Make this sentence shorter: The meeting that we had on Monday was very long and tiring.",
    "Make this sentence more formal: Hey, got your mail, looks good.",
    "List five mammals.",
    "Name three insects and say one thing about each.",
    "Give me a numbered list of four pieces of furniture.",
    "Which three tools does a carpenter need most?",
    "Write a Python function that multiplies two numbers.",
    "Write a Python function that returns the last element of a list.",
    "Write a short Python program that squares every number of a list and prints the result.",
    "Show me a Python loop that prints the numbers from 1 to 10.",
    "What is 17 plus 26?",
    "Anna has 14 apples and eats 5. How many are left?",
    "A ticket costs 7 dollars. How much do 6 tickets cost?",
    "What is half of 58?",
    "Tom reads 12 pages a day. How many pages does he read in 5 days?",
    "Which number is larger, 39 or 93?",
)


def _arithmetic() -> list[str]:
    prompts = []
    for step in range(48):
        a, b = 11 + 7 * step % 83, 3 + 5 * step % 29
        prompts.append(
            (
                f"What is {a} plus {b}?",
                f"What is {a} minus {b}?",
                f"Sam has {a} coins and finds {b} more. How many coins does he have?",
                f"A box holds {b} pens. How many pens are in {2 + step % 9} boxes?",
            )[step % 4]
        )
    return prompts


def _conversations(prompts: list[str]) -> list[Messages]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


def train() -> list[Messages]:
    """The training prompts, kinds interleaved."""
    kinds = [
        [p.format(v) for v in values for p in patterns] for patterns, values in (_QUESTIONS, _REWRITES, _LISTS, _CODE)
    ]
    kinds.append(_arithmetic())
    longest = max(len(kind) for kind in kinds)
    return _conversations([kind[i] for i in range(longest) for kind in kinds if i < len(kind)])


def heldout() -> list[Messages]:
    """The held-out prompts: some fill a known pattern with a new value, some are of a new pattern."""
    return _conversations(list(_HELDOUT))
