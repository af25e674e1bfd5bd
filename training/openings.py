"""First words of questions. They keep a small model, which asks itself, from always asking the same."""

from __future__ import annotations

import random

FREE = 4  # one question in so many begins with nothing given
OPENINGS = (
    "Write a short story about {}.",
    "Write an email about {}",
    "Write a poem about {}.",
    "Explain {} to a child.",
    "Explain how",
    "What is the difference between",
    "How do I",
    "Why",
    "Give me a list of",
    "Translate the following sentence from German to English:",
    "Translate this text about {} into French:\n\n",
    "Summarize the following article about {}:\n\n",
    "Answer the question from the text.\n\nText: A report on {} says that",
    "Correct the grammar of this paragraph:\n\n",
    "Extract the names and dates from this text about {}:\n\n",
    "Solve this problem step by step: A shop sells {} at",
    "If a train travels",
    "Calculate",
    "Write a Python function that",
    "Fix this code:\n\n",
    "Pretend that you are an expert on {} and",
    "Give three arguments for and three against {}.",
    "Say for each of these sentences about {} whether it is positive or negative:\n\n",
    "Continue this conversation about {}:\n\n",
)
_SUBJECTS = """
climate change, a lighthouse, bread, the French Revolution, chess, black holes, a job interview, cats
electric cars, the human heart, a small garden, inflation, football, the Roman Empire, photosynthesis
a lost key, machine learning, the ocean, coffee, a hospital, democracy, volcanoes, a wedding, bicycles
the internet, ancient Egypt, vaccines, a rainy day, music, gravity, a bank, whales, remote work, painting
earthquakes, a school, apples, railways, the moon, sleep, a detective, taxes, bees, mountains, medicine
a restaurant, prime numbers, friendship, robots, water
"""
SUBJECTS = tuple(_SUBJECTS.strip().replace("\n", ", ").split(", "))


def opening(seed: int, number: int) -> str:
    """How a question begins, with one in four nothing. Ends with a full stop if it may be all of it."""
    chance = random.Random(draw(seed, number, "opening"))
    if not chance.randrange(FREE):
        return ""
    return chance.choice(OPENINGS).format(chance.choice(SUBJECTS))


def draw(seed: int, number: int, purpose: str) -> int:
    """A seed of 63 bits of its own for each use of each number."""
    return random.Random(f"{seed} {number} {purpose}").getrandbits(63)
