"""The tables in the package: each is of a known card, of this version's kernels, and answers with nothing that its card cannot run."""

from uniattn.tuning.cards import CARDS
from uniattn.tuning.choose import SHIPPED, card_of
from uniattn.tuning.kernels import source_hash
from uniattn.tuning.table import load, usable


def test_shipped_tables_can_be_used():
    assert (SHIPPED / "README.md").is_file()
    cards = {card_of(card.name): card for card in CARDS.values()}
    for path in SHIPPED.glob("*.json"):
        table, faults = load(path)
        assert not faults, path
        stale = [name for name, digest in table.sources.items() if digest != source_hash(name)]
        assert not stale, f"{path}: the source of {stale} has changed since: tune again, or remove the table"
        found = usable(path, cards[path.stem], table.triton)
        assert found.passed_over == (), path
        assert sum(map(len, found.answers.values())) > 0, path
