"""A few hundred folders of models with corrupted members, of fixed seeds: only errors of featherbed's own."""

import pytest

from fuzz import folders

CHUNKS, FOLDERS = 2, 200


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    pytest.importorskip("faiss", reason="compression: pip install featherbed[compress]")
    pytest.importorskip("tokenizers", reason="pieces of words: pip install featherbed[text]")
    root = tmp_path_factory.mktemp("folders")
    folders.write_folders(root)
    return root


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_corrupted_folders(chunk, corpus):
    numbers = range(chunk * FOLDERS, (chunk + 1) * FOLDERS)
    counts, found = folders.fuzz(corpus, numbers, seed=0, jobs=1)
    assert not found, "\n".join(found)[:3000]
    assert counts["folders"] == FOLDERS
    assert counts["opened"] > FOLDERS // 5


def test_sound_folders_open_and_work(corpus):
    for path in sorted(corpus.iterdir()):
        assert folders.exercise(path, path.name.partition("-")[0]) == (True, []), path.name
