"""Prompts of our own, for a machine without a data set: some repeat their input, others do not."""

from __future__ import annotations

PARAGRAPH = (
    "The harbour of Lindau lies on the eastern shore of Lake Constance. Its entrance is framed by a lion of "
    "Bavarian stone and a white lighthouse, both built in 1856. Ferries leave for Bregenz and Konstanz every "
    "hour in summer, and sailing boats fill the berths until October. In winter the promenade is quiet, the "
    "cafes close early, and swans gather where the ferries used to turn."
)
CODE = """def total_price(items, discount):
    total = 0
    for item in items:
        total = total + item.price * item.count
    if discount:
        total = total - total * discount
    return total


def print_total(items, discount):
    total = total_price(items, discount)
    print("total:", total)
    return total
"""
PROMPTS = {
    "edit": f"Correct the spelling of this text and write it out again:\n\n{PARAGRAPH}",
    "code-rename": f"Rename the variable total to amount. Write out the whole code:\n\n```python\n{CODE}```",
    "summarise": f"Summarise this text:\n\n{PARAGRAPH}",
    "extract": f"List every place that this text names, one a line:\n\n{PARAGRAPH}",
    "code-explain": f"What does this code do?\n\n```python\n{CODE}```",
    "chat": "Why do cats purr?",
    "story": "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "arithmetic": "A train leaves at 9:40 and needs 2 hours and 35 minutes. When does it arrive? Explain.",
}
WARM_UP = "Count from one to twenty in words, separated by commas."
