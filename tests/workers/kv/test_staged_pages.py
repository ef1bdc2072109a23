from workers.kv.staged_pages import StagedPages

KEYS = [b"a", b"b", b"c"]
NAMES = [key.hex() for key in KEYS]


def test_a_prefix_is_found_and_loaded() -> None:
    staged = StagedPages()
    staged.add("r", KEYS[:2], [7, 4])
    assert (staged.count("r", NAMES), staged.count("other", NAMES)) == (2, 0)
    assert staged.begin_load("r", NAMES[:2]) == [7, 4]
    assert staged.begin_load("r", NAMES) is None


def test_a_removal_is_answered_when_no_load_runs() -> None:
    staged = StagedPages()
    staged.add("r", KEYS, [1, 2, 3])
    staged.begin_load("r", NAMES)
    staged.remove("r", 11)
    assert staged.take_removed("r") == []
    staged.end_load("r")
    assert staged.take_removed("r") == [11]
    assert staged.take_removed("r") == []


def test_clearing_answers_all_removals() -> None:
    staged = StagedPages()
    staged.add("r", KEYS, [1, 2, 3])
    staged.begin_load("r", NAMES)
    staged.remove("r", 11)
    assert staged.clear() == [11]
    assert staged.count("r", NAMES) == 0
