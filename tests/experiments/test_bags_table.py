"""What the table of bags says of its rows."""

from experiments.tables import bags


def row(split, written, by_bags, mib=0):
    settings = ("v5e:2x4", "sums", "100", "8", "4", split)
    found = {
        "written cycles": written,
        "written MiB": 7,
        "bags cycles": by_bags,
        "bags MiB": mib,
        "predicted cycles": 3,
    }
    return dict(zip(bags.SETTINGS, settings, strict=True)) | {name: str(value) for name, value in found.items()}


def test_what_is_said_of_rows():
    found = [row("rows", 8, 4), row("rows", 9, 3, 2), row("examples", 8, 10)]
    said = bags.verdict(found)
    assert "2.00 to 3.00 times as fast by rows" in said and "0.80 to 0.80 times as fast by examples" in said
    assert "at most 2 MiB" in said
    shown = {str(column.header): list(column.cells) for column in bags.table(found).columns}
    assert shown["written / bags"] == ["2.00", "3.00", "0.80"] and shown["examples x bag"] == ["8 x 4"] * 3


def test_of_each_the_op_and_what_it_replaces_do_the_same():
    for graph in (make(64, 8, 4) for make in bags.OF.values()):
        ((op, (rows, one)),) = bags.baggable(graph).items()
        assert one.outputs == op.outputs and {"gather", "broadcast_in_dim"} & {rows.name}
