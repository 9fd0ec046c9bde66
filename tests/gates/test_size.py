"""The size gate finds the long tail and lets the rest pass."""

from pathlib import Path

from ci.gates import size


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def function(lines: int) -> str:
    return "def long_one():\n" + "    x = 1\n" * lines


def test_a_function_of_61_lines_is_found_and_one_of_60_is_not(tmp_path, capsys):
    write(tmp_path, "core/a.py", function(60))
    assert size.main(["--root", str(tmp_path)]) == 0
    write(tmp_path, "core/b.py", function(61))
    assert size.main(["--root", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "too long: core/b.py:1 long_one: 61 lines, 60 allowed" in printed
    assert "longest function: 61 lines" in printed


def test_arguments_and_the_docstring_do_not_count_but_what_follows_them_does(tmp_path):
    arguments = "".join(f"    a{number},\n" for number in range(70))
    said = '    """Says\n' + "    more\n" * 70 + '    """\n'
    write(tmp_path, "core/a.py", f"@mark\ndef wide(\n{arguments}):\n{said}    # a note\n\n" + "    x = 1\n" * 60)
    assert size.main(["--root", str(tmp_path)]) == 0
    functions, _ = size.measure(tmp_path)
    assert functions == [(60, "core/a.py:2 wide", 60)]
    write(tmp_path, "core/b.py", f"def wide(\n{arguments}):\n{said}    x = (\n" + "        1,\n" * 59 + "    )\n")
    assert size.main(["--root", str(tmp_path)]) == 1


def test_only_a_docstring_is_no_line_and_decorators_inside_are(tmp_path):
    inner = "    @one\n    @two\n    def inner():\n        pass\n"
    write(tmp_path, "core/a.py", f'def said():\n    """Only this."""\n\n\ndef outer():\n{inner}')
    functions, _ = size.measure(tmp_path)
    assert {each.where.split()[-1]: each.lines for each in functions} == {"said": 0, "outer": 4, "inner": 1}


def test_a_nested_method_counts(tmp_path):
    body = "".join(f"        {line}\n" for line in function(69).splitlines())
    write(tmp_path, "plugins/api/a.py", f"class C:\n    def outer(self):\n{body}")
    functions, _ = size.measure(tmp_path)
    assert [f.lines for f in functions] == [70, 69]


def test_a_file_of_401_lines_is_found_and_one_of_400_is_not(tmp_path, capsys):
    write(tmp_path, "backends/x/a.py", "x = 1\n" * 400)
    assert size.main(["--root", str(tmp_path)]) == 0
    write(tmp_path, "backends/x/a.py", "x = 1\n" * 401)
    assert size.main(["--root", str(tmp_path)]) == 1
    assert "too long: backends/x/a.py: 401 lines" in capsys.readouterr().out


def test_tests_are_exempt(tmp_path):
    write(tmp_path, "tests/a.py", function(900))
    assert size.main(["--root", str(tmp_path)]) == 0
