"""The size gate finds the long tail and lets the rest pass."""

from pathlib import Path

from ci.gates import size


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def function(lines: int) -> str:
    return "def long_one():\n" + "    x = 1\n" * (lines - 1)


def test_a_function_of_61_lines_is_found_and_one_of_60_is_not(tmp_path, capsys):
    write(tmp_path, "core/a.py", function(60))
    assert size.main(["--root", str(tmp_path)]) == 0
    write(tmp_path, "core/b.py", function(61))
    assert size.main(["--root", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "too long: core/b.py:1 long_one: 61 lines, 60 allowed" in printed
    assert "longest function: 61 lines" in printed


def test_a_nested_method_counts(tmp_path):
    body = "".join(f"        {line}\n" for line in function(70).splitlines())
    write(tmp_path, "plugins/api/a.py", f"class C:\n    def outer(self):\n{body}")
    functions, _ = size.measure(tmp_path)
    assert [f.lines for f in functions] == [71, 70]


def test_a_file_of_401_lines_is_found_and_one_of_400_is_not(tmp_path, capsys):
    write(tmp_path, "backends/x/a.py", "x = 1\n" * 400)
    assert size.main(["--root", str(tmp_path)]) == 0
    write(tmp_path, "backends/x/a.py", "x = 1\n" * 401)
    assert size.main(["--root", str(tmp_path)]) == 1
    assert "too long: backends/x/a.py: 401 lines" in capsys.readouterr().out


def test_tests_are_exempt(tmp_path):
    write(tmp_path, "tests/a.py", function(900))
    assert size.main(["--root", str(tmp_path)]) == 0


def test_of_a_kernel_the_body_counts_alone(tmp_path):
    arguments = "".join(f"    a{number},\n" for number in range(70))
    said = '    """Says\n' + "    more\n" * 70 + '    """\n'
    for mark, lines in (("@triton.jit", 60), ('@triton.jit(do_not_specialize=["M"])', 60), ("@cache", 204)):
        write(tmp_path, "core/a.py", f"{mark}\ndef wide(\n{arguments}):\n{said}" + "    x = 1\n" * 60)
        functions, _ = size.measure(tmp_path)
        assert [each.lines for each in functions] == [lines], mark
