"""docs/families.md says what hf_mla.families says; `python tests/test_families_page.py` writes its table anew."""

from __future__ import annotations

from pathlib import Path

from hf_mla.families import REFUSED, SERVED, Family

PAGE = Path(__file__).parent.parent / "docs" / "families.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"

READS = {
    "absorbed": ("pages, absorbed", "any"),
    "sparse": ("picked tokens of the pages, absorbed", "torch"),
    "dense": ("history gathered and expanded", "the model's own"),
}


def row(name: str, family: Family) -> str:
    reads, backend = READS[family.way]
    linear = family.others == "linear attention"
    beside = [kept for kept in ("" if family.way == "absorbed" else "indexer keys", family.others) if kept]
    cells = [
        f"`{name}`",
        family.models,
        reads,
        backend,
        "yes" if family.graphs else "no",
        ", ".join(beside) or "nothing",
        "no, as in stock" if linear else "yes",
        family.note,
    ]
    return f"| {' | '.join(cells)} |\n"


def table() -> str:
    head = [
        "`model_type`",
        "models",
        "a decode step reads",
        "kernels",
        "CUDA graphs",
        "beside latents",
        "rollback",
        "",
    ]
    lines = [f"| {' | '.join(head)} |\n", f"|{'---|' * len(head)}\n"]
    lines += [row(name, family) for name, family in SERVED.items()]
    lines += [f"| `{name}` | | refused: {reason} | | | | | |\n" for name, reason in REFUSED.items()]
    return "".join(lines)


def test_the_page_has_the_table_of_the_package() -> None:
    text = PAGE.read_text()
    lines = text.split(BEGIN)[1].split(END)[0].splitlines()
    assert sorted(lines) == sorted(table().splitlines())  # other tests take a family out and put it back, last


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1])
