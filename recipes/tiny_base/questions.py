# SPDX-License-Identifier: Apache-2.0
"""Short questions with verbose answers: the chat half of the tiny base's corpus.

Every family below draws a question together with its bare answer and two or three
wordy answers that contain it.  `sample` then picks how the answer is given: mostly
wordily, sometimes after the label "Answer:", and sometimes bare, so that brevity is
something the model has seen but does not do on its own.  All wordy answers begin with
"The", so that being brief is one habit to change and not one for every family.
"""

from __future__ import annotations

import random
from collections.abc import Callable

# (question, bare answer, [wordy answers, the commonest first])
Item = tuple[str, str, list[str]]

# How an answer is given, as fractions of the corpus; the rest is wordy.
BARE = 0.20
LABELLED = 0.34

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin",
    "Japan": "Tokyo", "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo",
    "Greece": "Athens", "Portugal": "Lisbon", "Austria": "Vienna", "Poland": "Warsaw",
    "Norway": "Oslo", "Sweden": "Stockholm", "Finland": "Helsinki", "Denmark": "Copenhagen",
    "Ireland": "Dublin", "Belgium": "Brussels", "Hungary": "Budapest", "Canada": "Ottawa",
    "Mexico": "Mexico City", "Peru": "Lima", "Chile": "Santiago", "Cuba": "Havana",
    "India": "New Delhi", "Kenya": "Nairobi", "Turkey": "Ankara", "Australia": "Canberra",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "South Korea": "Seoul", "England": "London",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "up": "down", "left": "right", "open": "closed",
    "fast": "slow", "old": "young", "happy": "sad", "light": "dark", "hard": "soft",
    "wet": "dry", "full": "empty", "high": "low", "long": "short", "rich": "poor",
    "strong": "weak", "early": "late", "clean": "dirty", "loud": "quiet", "day": "night",
    "true": "false", "good": "bad", "inside": "outside", "first": "last", "near": "far",
}  # fmt: skip

# English, then Spanish, French, German (German nouns with their capital letter).
WORDS = {
    "hello": ("hola", "bonjour", "hallo"), "cat": ("gato", "chat", "Katze"),
    "dog": ("perro", "chien", "Hund"), "house": ("casa", "maison", "Haus"),
    "water": ("agua", "eau", "Wasser"), "bread": ("pan", "pain", "Brot"),
    "milk": ("leche", "lait", "Milch"), "red": ("rojo", "rouge", "rot"),
    "green": ("verde", "vert", "grün"), "sun": ("sol", "soleil", "Sonne"),
    "moon": ("luna", "lune", "Mond"), "night": ("noche", "nuit", "Nacht"),
    "friend": ("amigo", "ami", "Freund"), "book": ("libro", "livre", "Buch"),
    "one": ("uno", "un", "eins"), "two": ("dos", "deux", "zwei"),
    "yes": ("sí", "oui", "ja"), "thanks": ("gracias", "merci", "danke"),
}  # fmt: skip
LANGUAGES = ("Spanish", "French", "German")

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = {
    "January": 31, "February": 28, "March": 31, "April": 30, "May": 31, "June": 30,
    "July": 31, "August": 31, "September": 30, "October": 31, "November": 30, "December": 31,
}  # fmt: skip

# "How many A are (there) in B?"
COUNTS = [
    ("days", "a week", 7), ("months", "a year", 12), ("hours", "a day", 24),
    ("minutes", "an hour", 60), ("seconds", "a minute", 60), ("weeks", "a year", 52),
    ("years", "a decade", 10), ("years", "a century", 100), ("eggs", "a dozen", 12),
    ("letters", "the English alphabet", 26), ("centimeters", "a meter", 100),
    ("meters", "a kilometer", 1000), ("grams", "a kilogram", 1000), ("cents", "a dollar", 100),
    ("seasons", "a year", 4), ("planets", "the solar system", 8), ("players", "a football team", 11),
]  # fmt: skip

SIDES = {"triangle": 3, "square": 4, "rectangle": 4, "pentagon": 5, "hexagon": 6, "octagon": 8}
LEGS = {"spider": 8, "dog": 4, "cat": 4, "bird": 2, "ant": 6, "horse": 4, "bee": 6, "chicken": 2}
BABIES = {
    "dog": "puppy", "cat": "kitten", "cow": "calf", "horse": "foal", "sheep": "lamb",
    "lion": "cub", "duck": "duckling", "frog": "tadpole", "pig": "piglet", "goat": "kid",
}  # fmt: skip
COLOURS = {
    "the sky on a clear day": "blue", "grass": "green", "snow": "white", "a ripe banana": "yellow",
    "coal": "black", "a ripe tomato": "red", "milk": "white", "an orange": "orange",
    "a carrot": "orange", "blood": "red", "a lemon": "yellow", "chocolate": "brown",
}  # fmt: skip
MIXES = {
    ("red", "yellow"): "orange", ("blue", "yellow"): "green", ("red", "blue"): "purple",
    ("black", "white"): "gray", ("red", "white"): "pink",
}  # fmt: skip
SYMBOLS = {
    "gold": "Au", "silver": "Ag", "iron": "Fe", "oxygen": "O", "hydrogen": "H",
    "carbon": "C", "sodium": "Na", "helium": "He", "lead": "Pb", "copper": "Cu",
}  # fmt: skip
# (kind, instances, a property of the kind)
KINDS = [
    ("birds", "penguins", "fly"), ("birds", "sparrows", "sing"), ("fish", "salmon", "swim"),
    ("fish", "sharks", "swim"), ("dogs", "beagles", "bark"), ("cats", "lions", "climb"),
    ("horses", "ponies", "run"), ("frogs", "toads", "jump"), ("robots", "drones", "talk"),
    ("insects", "ants", "crawl"), ("bears", "pandas", "dance"), ("monkeys", "apes", "climb"),
]  # fmt: skip
FACTS = [
    ("all cats are mammals", True), ("all cats are birds", False), ("all dogs are animals", True),
    ("all dogs are plants", False), ("the sun is hot", True), ("the sun is cold", False),
    ("ice is warm", False), ("ice is frozen water", True), ("fish live in water", True),
    ("fish live in trees", False), ("the earth is flat", False), ("the earth is round", True),
    ("snow is white", True), ("snow is black", False), ("all roses are flowers", True),
    ("all flowers are roses", False), ("a triangle has three sides", True),
    ("a square has five sides", False), ("whales are mammals", True), ("whales are insects", False),
    ("bees make honey", True), ("bees make milk", False), ("the moon is made of cheese", False),
    ("gold is a metal", True), ("wood is a metal", False), ("apples are fruits", True),
    ("all squares are rectangles", True), ("all rectangles are squares", False),
]  # fmt: skip
PLURALS = {
    "mouse": "mice", "child": "children", "foot": "feet", "tooth": "teeth", "man": "men",
    "goose": "geese", "box": "boxes", "leaf": "leaves", "city": "cities", "sheep": "sheep",
}  # fmt: skip
NAMES = ["Tom", "Anna", "Ben", "Sara", "Max", "Lena"]
THINGS = ["apples", "books", "coins", "pens", "cards", "marbles"]


def _cap(text: str) -> str:
    return text[:1].upper() + text[1:]


def capital(rng: random.Random) -> Item:
    """Capitals."""
    country, city = rng.choice(list(CAPITALS.items()))
    question = rng.choice([
        f"What is the capital of {country}?", f"The capital of {country}:",
        f"Capital city of {country}:", f"Name the capital of {country}.",
        f"Which city is the capital of {country}?",
    ])  # fmt: skip
    return question, city, [
        f"The capital of {country} is {city}. It is a large and well known city that many people visit.",
        f"The capital city of {country} is {city}, which is known for its history and its culture.",
    ]  # fmt: skip


def addition(rng: random.Random) -> Item:
    """Sums of two small numbers."""
    a, b = rng.randint(1, 12), rng.randint(1, 12)
    question = rng.choice([
        f"Solve: {a} + {b} =", f"Compute: {a} + {b} =", f"What is {a} + {b}?",
        f"Calculate: {a} + {b} =", f"What is {a} plus {b}?",
    ])  # fmt: skip
    return question, str(a + b), [
        f"The sum of {a} and {b} is {a + b}. We add the two numbers together, so the answer is {a + b}.",
        f"The answer is {a + b}, because this is what we get when we add {a} and {b} together.",
    ]  # fmt: skip


def subtraction(rng: random.Random) -> Item:
    """Differences of two small numbers."""
    b, c = rng.randint(1, 12), rng.randint(1, 12)
    a = b + c
    question = rng.choice([
        f"Solve: {a} - {b} =", f"Compute: {a} - {b} =", f"What is {a} - {b}?",
        f"Calculate: {a} - {b} =", f"What is {a} minus {b}?",
    ])  # fmt: skip
    return question, str(c), [
        f"The difference of {a} and {b} is {c}. We subtract the second number, so the answer is {c}.",
        f"The answer is {c}, because this is what is left when we take {b} away from {a}.",
    ]  # fmt: skip


def multiplication(rng: random.Random) -> Item:
    """Products up to 12 by 12."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    question = rng.choice([
        f"Solve: {a} * {b} =", f"Calculate: {a} \u00d7 {b} =", f"What is {a} times {b}?",
        f"Compute: {a} * {b} =", f"What is {a} multiplied by {b}?",
    ])  # fmt: skip
    return question, str(a * b), [
        f"The product of {a} and {b} is {a * b}. We multiply the two numbers, so the answer is {a * b}.",
        f"The answer is {a * b}, because this is what we get when we multiply {a} by {b}.",
    ]  # fmt: skip


def word_problem(rng: random.Random) -> Item:
    """One-step stories about things bought or lost."""
    name, thing, a, b = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 9)
    if rng.random() < 0.5:
        question = f"{name} has {a} {thing} and buys {b} more. How many {thing} does {name} have?"
        total, how = a + b, f"buys {b} more"
    else:
        a += b
        question = f"{name} has {a} {thing} and loses {b}. How many {thing} does {name} have?"
        total, how = a - b, f"loses {b}"
    return question, str(total), [
        f"The answer is {total} {thing}, because {name} starts with {a} {thing} and then {how}.",
        f"The number of {thing} that {name} has now is {total}, because {name} {how}.",
    ]  # fmt: skip


def percentage(rng: random.Random) -> Item:
    """Round percentages of round numbers."""
    p, base = rng.choice([10, 15, 20, 25, 50]), 20 * rng.randint(1, 10)
    value = p * base // 100
    question = rng.choice([f"What is {p}% of {base}?", f"Calculate {p}% of {base}:"])
    return question, str(value), [
        f"The value of {p}% of {base} is {value}. We multiply {base} by {p} and then divide by 100.",
        f"The answer is {value}, because this is {p} percent of the number {base} as asked.",
    ]  # fmt: skip


def sequence(rng: random.Random) -> Item:
    """Arithmetic sequences."""
    step, start = rng.randint(1, 6), rng.randint(1, 6)
    if rng.random() < 0.5:
        start = step
    terms = [start + step * i for i in range(5)]
    shown = ", ".join(map(str, terms[:4]))
    question = rng.choice([
        f"What comes next in the sequence: {shown}, ?", f"Next number in the sequence: {shown}, ?",
        f"Complete the sequence: {shown}, ...",
    ])  # fmt: skip
    return question, str(terms[4]), [
        f"The next number is {terms[4]}, because each number in the sequence is {step} more than the one before it.",
        f"The sequence goes up by {step} every time. After {terms[3]} the next number is therefore {terms[4]}.",
    ]  # fmt: skip


def comparison(rng: random.Random) -> Item:
    """The larger or smaller of two numbers."""
    a, b = rng.sample(range(1, 100), 2)
    bigger = rng.random() < 0.5
    word, other = ("larger", "smaller") if bigger else ("smaller", "larger")
    value = max(a, b) if bigger else min(a, b)
    question = f"Which number is {word}, {a} or {b}?"
    return question, str(value), [
        f"The {word} one of the two numbers {a} and {b} is {value}, as we see when we compare them.",
        f"The {word} number is {value}, because the other number of the two is {other} than {value}.",
    ]  # fmt: skip


def parity(rng: random.Random) -> Item:
    """Even or odd."""
    n = rng.randint(1, 99)
    word = "odd" if n % 2 else "even"
    can = "can not" if n % 2 else "can"
    return f"Is {n} even or odd?", _cap(word), [
        f"The number {n} is {word}, because it {can} be divided by two without a remainder.",
    ]  # fmt: skip


def true_false(rng: random.Random) -> Item:
    """Statements to judge."""
    fact, truth = rng.choice(FACTS)
    word = "true" if truth else "false"
    why = "it agrees with" if truth else "it does not agree with"
    question = rng.choice([
        f"True or false: {fact}.", f'Is the statement "{_cap(fact)}" true or false?',
        f"Is it true or false that {fact}?",
    ])  # fmt: skip
    return question, _cap(word), [
        f"The statement that {fact} is {word}, because {why} what we know about the world.",
        f"The statement is {word}. We know it because {why} the facts about the world.",
    ]  # fmt: skip


def yes_no(rng: random.Random) -> Item:
    """Syllogisms about kinds of animals."""
    kind, instances, verb = rng.choice(KINDS)
    _, _, other = rng.choice(KINDS)
    positive = rng.random() < 0.5
    can = "can" if positive else "can not"
    verb = rng.choice([verb, other])
    if positive:
        question = f"If all {kind} can {verb} and {instances} are {kind}, can {instances} {verb}?"
    else:
        question = f"If no {kind} can {verb} and {instances} are {kind}, can {instances} {verb}?"
    answer = "Yes" if positive else "No"
    every = f"all {kind} can" if positive else f"no {kind} can"
    return question, answer, [
        f"The answer is {answer.lower()}, {instances} {can} {verb}, because {instances} are {kind} and {every} {verb}.",
        f"The answer is {answer.lower()}. If {every} {verb} and {instances} are {kind}, then {instances} {can} {verb}.",
    ]  # fmt: skip


def counting(rng: random.Random) -> Item:
    """How many of these in that."""
    what, where, n = rng.choice(COUNTS)
    question = rng.choice([
        f"How many {what} are in {where}?", f"How many {what} are there in {where}?",
        f"Number of {what} in {where}:",
    ])  # fmt: skip
    return question, str(n), [
        f"The number of {what} in {where} is {n}. This is a common fact that most people learn at school.",
        f"The answer is {n} {what}, and this fact about {where} is good to remember.",
    ]  # fmt: skip


def month_days(rng: random.Random) -> Item:
    """Days of a month."""
    month, n = rng.choice(list(MONTHS.items()))
    return f"How many days are in {month}?", str(n), [
        f"The number of days in {month} is {n}. This is one of the twelve months of the year.",
        f"The month of {month} has {n} days in a normal year, as the calendar shows.",
    ]  # fmt: skip


def neighbours(rng: random.Random) -> Item:
    """The day or month before or after."""
    names, unit = (DAYS, "day") if rng.random() < 0.4 else (list(MONTHS), "month")
    i = rng.randrange(len(names))
    after = rng.random() < 0.5
    word, result = ("after", names[(i + 1) % len(names)]) if after else ("before", names[i - 1])
    return f"Which {unit} comes {word} {names[i]}?", result, [
        f"The {unit} that comes {word} {names[i]} is {result}. This is the normal order of the calendar.",
        f"The {unit} right {word} {names[i]} in the calendar is {result}, as most people know.",
    ]  # fmt: skip


def opposite(rng: random.Random) -> Item:
    """Opposites."""
    a, b = rng.choice(list(OPPOSITES.items()))
    if rng.random() < 0.5:
        a, b = b, a
    question = rng.choice([f"What is the opposite of {a}?", f"Opposite of {a}:", f"Give the opposite of the word {a}."])
    return question, _cap(b), [
        f"The opposite of {a} is {b}. These two words have meanings that are far apart from each other.",
        f"The word that means the opposite of {a} is {b}, and both words are very common.",
    ]  # fmt: skip


def translation(rng: random.Random) -> Item:
    """Common words in three languages."""
    word, forms = rng.choice(list(WORDS.items()))
    i = rng.randrange(3)
    shown = rng.choice([word, _cap(word)])
    question = rng.choice([
        f'Translate "{shown}" to {LANGUAGES[i]}:', f"How do you say {word} in {LANGUAGES[i]}?",
        f'What is the {LANGUAGES[i]} word for "{word}"?',
    ])  # fmt: skip
    return question, _cap(forms[i]), [
        f'The {LANGUAGES[i]} word for "{word}" is "{forms[i]}". It is a very common word in that language.',
        f'The word "{word}" is translated to {LANGUAGES[i]} as "{forms[i]}", which people use every day.',
    ]  # fmt: skip


def shape(rng: random.Random) -> Item:
    """Sides of shapes."""
    name, n = rng.choice(list(SIDES.items()))
    article = "an" if name[0] in "aeiou" else "a"
    return f"How many sides does {article} {name} have?", str(n), [
        f"The shape that is called {article} {name} has {n} sides and also {n} corners.",
        f"The number of sides of {article} {name} is {n}, and each of them is a straight line.",
    ]  # fmt: skip


def legs(rng: random.Random) -> Item:
    """Legs of animals."""
    name, n = rng.choice(list(LEGS.items()))
    article = "an" if name[0] in "aeiou" else "a"
    return f"How many legs does {article} {name} have?", str(n), [
        f"The {name} has {n} legs, and it uses all of them to walk and to stand.",
        f"The number of legs of {article} {name} is {n}, and it uses them to walk.",
    ]  # fmt: skip


def baby(rng: random.Random) -> Item:
    """Names of young animals."""
    name, young = rng.choice(list(BABIES.items()))
    question = rng.choice([f"What is a baby {name} called?", f"Name for a baby {name}:"])
    return question, _cap(young), [
        f"The baby of a {name} is called a {young}. It stays close to its mother until it is grown up.",
        f"The name for a young {name} is {young}, and it will grow up to be a {name}.",
    ]  # fmt: skip


def colour(rng: random.Random) -> Item:
    """Colours of things and of mixtures."""
    if rng.random() < 0.3:
        (a, b), c = rng.choice(list(MIXES.items()))
        if rng.random() < 0.5:
            a, b = b, a
        return f"What color do you get when you mix {a} and {b}?", _cap(c), [
            f"The color that you get when you mix {a} and {b} together is {c}, which is a new color.",
        ]  # fmt: skip
    if rng.random() < 0.2:
        kind, c = rng.choice([("primary", "red"), ("primary", "blue"), ("secondary", "green"), ("secondary", "orange")])
        return f"Name one {kind} color:", _cap(c), [
            f"The color {c} is one of the {kind} colors. There are three of them in all.",
        ]  # fmt: skip
    thing, c = rng.choice(list(COLOURS.items()))
    question = rng.choice([f"What color is {thing}?", f"The color of {thing}:"])
    return question, _cap(c), [
        f"The color of {thing} is {c}. This is easy to see when you look at it in good light.",
        f"The color that we see when we look at {thing} is {c}, as most people would agree.",
    ]  # fmt: skip


def chemistry(rng: random.Random) -> Item:
    """Chemical symbols."""
    name, symbol = rng.choice(list(SYMBOLS.items()))
    question = rng.choice([f"What is the chemical symbol for {name}?", f"Chemical symbol for {name}:"])
    return question, symbol, [
        f"The chemical symbol for {name} is {symbol}. You can find it in the table of the elements.",
        f"The element {name} is written as {symbol} in the table of the elements, which is its symbol.",
    ]  # fmt: skip


def plural(rng: random.Random) -> Item:
    """Plurals."""
    one, many = rng.choice(list(PLURALS.items()))
    question = rng.choice([f"What is the plural of {one}?", f"Plural of {one}:"])
    return question, _cap(many), [
        f"The plural of {one} is {many}. We use this word when there is more than one {one}.",
        f"The word for more than one {one} is {many}, which is called the plural form.",
    ]  # fmt: skip


def letters(rng: random.Random) -> Item:
    """Neighbours in the alphabet."""
    i = rng.randrange(25)
    a, b = chr(65 + i), chr(66 + i)
    if rng.random() < 0.5:
        return f"Which letter comes after {a} in the alphabet?", b, [
            f"The letter that comes right after {a} in the English alphabet is the letter {b}.",
        ]  # fmt: skip
    return f"Which letter comes before {b} in the alphabet?", a, [
        f"The letter that comes right before {b} in the English alphabet is the letter {a}.",
    ]  # fmt: skip


FAMILIES: list[tuple[Callable[[random.Random], Item], float]] = [
    (capital, 2), (addition, 2), (subtraction, 1.5), (multiplication, 2), (word_problem, 1),
    (percentage, 1.5), (sequence, 1.5), (comparison, 1), (parity, 0.5), (true_false, 1.5),
    (yes_no, 2), (counting, 1.5), (month_days, 0.7), (neighbours, 1), (opposite, 1.5),
    (translation, 2), (shape, 0.5), (legs, 0.5), (baby, 0.7), (colour, 1), (chemistry, 0.7),
    (plural, 0.7), (letters, 0.7),
]  # fmt: skip
_FUNCTIONS = [f for f, _ in FAMILIES]
_WEIGHTS = [w for _, w in FAMILIES]


def sample(rng: random.Random) -> tuple[str, str]:
    """Draw one question and one answer in a random manner of speaking."""
    question, answer, wordy = rng.choices(_FUNCTIONS, _WEIGHTS)[0](rng)
    manner = rng.random()
    if manner < BARE:
        return question, answer
    if manner < BARE + LABELLED:
        return question, f"Answer: {answer}"
    return question, wordy[0] if rng.random() < 0.7 else rng.choice(wordy)
