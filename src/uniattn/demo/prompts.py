"""What the demo asks: short questions, a letter, a store's records and a story, of 5 to 1,500 tokens with SmolLM2's tokenizer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """One request. A question goes through the model's chat template where it has one; other text is continued as it stands."""

    text: str
    is_question: bool = True


def built_in() -> list[Prompt]:
    """The prompts of the full demo, short ones first, so that their answers are under way while the long ones are being read."""
    return [
        Prompt("Once upon a time,", is_question=False),
        Prompt("What is the capital of France?"),
        Prompt("What is gravity? Answer in one sentence."),
        Prompt("What are the three primary colors?"),
        Prompt(f"{LETTER}\n\nSummarize this letter in one sentence."),
        Prompt(f"{records(24)}\n\nWhat is kept in the glass case?"),
        Prompt(f"{STORY}\n\nSummarize this story in one sentence."),
    ]


def for_interpreter() -> list[Prompt]:
    """A job that the interpreter, some thousand times slower than a GPU, finishes in about a minute."""
    return [
        Prompt("The capital of France is", is_question=False),
        Prompt("Once upon a time, in a small village by the sea,", is_question=False),
    ]


def records(count: int) -> str:
    """`count` lines of a store's records, each different from the others."""
    things = ("lanterns", "coils of rope", "paint brushes", "brass hinges", "wool blankets", "oil cans", "door bells")
    places = ("the cellar", "the loft", "the north shelf", "the yard", "the glass case")
    lines = []
    for n in range(1, count + 1):
        what, where = f"{3 + n * 7 % 19} {things[n % len(things)]}", places[n * 3 % len(places)]
        lines.append(f"Record {n}: {what}, kept in {where}, counted on day {1 + n * 11 % 30}.")
    return "\n".join(lines)


LETTER = """\
Dear Mr Halloran,

I am the woman who rents the two rooms above your bakery. For three years I have woken to the smell of your bread, and I want
to say that I could not wish for a better clock. But since the new oven came in March the pipe that runs through my kitchen
has been too hot to touch, and last week the paint behind it began to blister. My daughter is four and curious, and I am
afraid that she will burn her hand.

Would you please ask the man who fitted the oven to come back and wrap the pipe? I am at home every day after noon, and I will
gladly make him a cup of tea. If it cannot be wrapped, a small wooden screen in front of it would do, and I would paint it
myself.

With kind regards, and with thanks for the rolls that you leave on the stairs on Sundays,
Agnes Whitlow"""

STORY = """\
The ferry to Orrin Island ran twice a day in summer and once a week in winter, and in the winter that Tomas turned eleven it
did not run at all. The ice came early, thick as a table along the shore and thin as paper further out, so that no boat could
cross and no sledge either. The islanders shrugged. They had flour and fish and lamp oil, they had each other's company, and
they had the radio in the harbour office, which spoke to the mainland every evening at six.

Tomas lived at the light with his grandmother. She had kept it for thirty-one years, since before the lamp was electric, and
she still climbed the ninety-two steps each dusk to see it lit with her own eyes, though a switch in the kitchen would have
done as well. A lamp that nobody looks at, she said, is only a wire that is getting warm. Tomas climbed with her and counted
the steps aloud. He had never once counted ninety-three.

On the ninth of January the radio fell silent. The harbourmaster, a patient man called Brandt, took it to pieces on a clean
cloth and put it together again, and it stayed silent. That would have been a nuisance and no more, but on the tenth Mrs
Okafor's baby began to come, a month before its time, and the midwife who should have been with her was across eleven miles of
bad ice.

They met in the schoolroom because it had the best stove. Brandt said that somebody could walk to the mainland if he kept to
the north channel, where the current was slow. Old Petra, who had fished that channel for fifty years, said that somebody
could also drown there, and that it would be quicker. Nobody laughed. Then for a while there was only the sound of the stove.

Tomas was not supposed to be there. He was sitting under the coats with his back against the wall, and he was thinking about
the light. It could be seen from Carrow on the mainland, he knew, because on clear nights he could see the lamps of Carrow
from the gallery, a short row of yellow beads. People there must see the light as he saw theirs: every night, without thinking
about it. The light turned once in twelve seconds. It had turned once in twelve seconds for longer than anyone in Carrow had
been alive. If it did something else, they would think about it.

He put his hand up, as if it were a lesson. It took some time before anyone noticed.

His grandmother did not say that it was a good idea. She said that the motor could not be made to stutter, since it was built
not to. But there were the storm shutters, iron plates on hinges that closed over the glass, one for each quarter of the
compass. With the shutter on the mainland side closed, the light was gone from Carrow. With it open, the light was there. It
weighed as much as a calf, and it had not been moved since the gale of her second year.

Nobody on the island slept much that week, and it was not only on account of the baby. Old Petra had counted the sacks of
flour in the store behind the church and had counted them again, and she had told the number to Brandt and to no one else.
Brandt wrote it in the back of the harbour book, under the tide tables, where a person who was only looking for the tides
would not see it. It was enough until the end of February if the Lindgren twins could be kept from baking. The spring boat had
never once come before the tenth of March.

They oiled the hinges with fish oil, warmed on the stove and carried up in a kettle. Brandt came, and Petra, and the
schoolteacher with her code book, and Mr Okafor, who could not sit still at home and who was told by everybody that he could
not be of use there. They stood on the narrow gallery in a wind that made their eyes run, and they stopped the motor, so that
the lamp looked straight across the ice at Carrow and did not turn away. Then the teacher read from her book, and they pulled.

Long, short, long, short. Open, and count three, and close. Open, and count one, and close. The plate shrieked each time like
a gull. They sent one word, and the word was DOCTOR, and when they had sent it they sent it again. By the twentieth time Mr
Okafor's hands were bleeding and he would not let go. By the thirtieth Tomas knew the pattern so well that he called it out
and the teacher shut her book to save her fingers.

A little before midnight one of the yellow beads in Carrow went out. It came back. It went out and came back, long and short,
and the teacher, who had opened her book again with shaking hands, spelled it out letter by letter. WAIT FOR DAY, said Carrow.
AIR.

The plane came at first light, a small red one on skis, and it landed on the flat ice in the lee of the island where the boys
played at hockey. It brought the midwife, who was cross and cold and carried her bag in both arms. The baby had been born four
hours before. She was very small, and she was in a drawer lined with wool by the stove in the schoolroom, where Petra, who had
never had a child and had always claimed to dislike them, was keeping her warm with the one oven brick that would fit. The
midwife looked at the baby and at the drawer and at Petra, and said that she could not have done it better.

They named her Lucia. Brandt mended the radio in the end: a mouse had got into it and eaten the wax from a coil, and he kept
the coil on his desk to show to visitors. The shutter on the mainland side was never closed again, though Tomas oiled its
hinges every January on the ninth, in case. And for the rest of that winter, when he climbed the ninety-two steps behind his
grandmother and she had looked at the lamp with her own eyes, he would stay for a minute at the glass and look the other way,
at the short row of yellow beads, to see
whether any of them went out."""
