"""What the benchmark commands do with the files they are to write."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvstore_bench.errors import InputError
from kvstore_bench.options import check_directory, check_writable, write_json, write_result


def test_results_are_utf_8_whatever_the_locale(tmp_path):
    code = "import sys, pathlib, kvstore_bench.options as o; o.write_result('--html', pathlib.Path(sys.argv[1]), '\\u2212 0.3')"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-X", "utf8=0", "-c", code, tmp_path / "page.html"], env=environment, check=True)
    assert (tmp_path / "page.html").read_bytes() == "\u2212 0.3".encode()


def test_what_cannot_be_written_is_told_with_its_option(tmp_path):
    (tmp_path / "file").touch()
    for file in (tmp_path, tmp_path / "nowhere" / "r.json"):
        with pytest.raises(InputError, match=r"^--json '.*' cannot be written$"):
            check_writable("--json", file)
        with pytest.raises(InputError, match=r"^--html '.*' cannot be written: "):
            write_result("--html", file, "")
    for directory in (tmp_path / "file", tmp_path / "nowhere"):
        with pytest.raises(InputError, match=r"^--plots '.*' is no directory$"):
            check_directory("--plots", directory)
    check_writable("--json", tmp_path / "new.json")
    check_directory("--plots", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_result_is_written_where_it_is_asked_for_alone(tmp_path):
    write_json(None, {"a": 1})
    write_json(tmp_path / "r.json", {"a": 1})
    assert (tmp_path / "r.json").read_text() == '{\n  "a": 1\n}\n'
