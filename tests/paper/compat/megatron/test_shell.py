"""Launch scripts are followed as bash does, without running anything."""

import subprocess
from pathlib import Path

import pytest

from pipemega.compat.megatron.shell_run import ScriptRun
from pipemega.compat.megatron.shell_syntax import ScriptError
from pipemega.compat.megatron.shell_words import shown

# Each script prints words with `show`, which bash and the test replace by their own command.
SCRIPTS = {
    "variables": 'A=1; B="$A $A"; show $B "$B" ${A}x \'$A\' "\\$A"',
    "defaults": 'show ${A:-d} ${A-e} "${B:=x y}" $B ${B:+set} ${A:+none}',
    "parameters": 'show $1 "$2" $# "$@" ${3:-third} ; shift; show $1',
    "arrays": 'A=(--a 1 "x y" # comment\n  --b\n); A+=(2); show ${A[@]} ; show "${A[@]}"',
    "elements": "A=(a b c); show ${#A[@]} ${A[1]} ${A[@]:1} ${A[-1]} $A",
    "arithmetic": "N=4; show $((N * 2 + 1)) $(($N / 3)) $((2 ** 3 - 1)) $(( (1 + 2) * N ))",
    "patterns": "F=a/b.tar.gz; show ${F##*/} ${F%.gz} ${F%%.*} ${F/b/c} ${F//a/x} ${#F} ${F:2:3}",
    "case of letters": "F=Abc; show ${F^^} ${F,,}",
    "continued lines": "show a \\\n  b \\\n  c\nshow d",
    "quoted list": 'ARGS="\n  --a 1 \\\n  --b 2 \n"\nshow $ARGS',
    "if": 'A=2; if [ $A -eq 1 ]; then show one; elif [[ $A == 2 && -n "$A" ]]; then show two; fi',
    "if not": 'if [ -z "${NONE}" ]; then show empty; else show full; fi',
    "case": "M=13b; case $M in\n 7b|8b) show small;;\n 13*) show large ;;\n *) show other;; esac",
    "for": "for i in 1 2 3; do show $i; done",
    "functions": 'f() { local X=$1; show "$X" $#; }\nf a b; function g { show g; }; g',
    "and or": 'A=1; [ $A = 1 ] && show yes; [ $A = 2 ] && show no; [ $A = 2 ] || show other',
    "here document": "cat <<EOF > cfg.json\n{\"a\": ${A:-3}}\nEOF\nshow $(cat cfg.json)",
    "substitution": 'show $(echo a b) $(basename /x/y.sh .sh) `dirname /x/y` $(expr 3 \\* 4)',
    "calculator": 'show $(echo "7 / 2" | bc) $(echo "scale=2; 7 / 2" | bc)',
    "eval": 'CMD="show a"; X=5; eval "$CMD \\$X"',
    "nested expansion": 'A=B; B=3; show ${!A} "${C:-${B}4}"',
    "comments": "show a # b\nshow '#' x#y",
    "exported": "export A=1 B='x y'; declare -i N=3; show $A $B $N",
    "redirections": "show a > /dev/null 2>&1\nshow b 2>/dev/null | tee copy",
    "indirect groups": "{ A=1; show $A; }; (show 2)",
}  # fmt: skip
BASH = 'show() { for w in "$@"; do printf "%s|" "$w" >&9; done; echo >&9; }\n'


def words_of(script: str, parameters: tuple[str, ...] = (), **variables: str) -> list[list[str]]:
    run = ScriptRun(None, variables, parameters)
    run.script(script)
    return [[shown(word) for word in command.words[1:]]
            for command in run.commands if command.words[0] == "show"]  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gives_the_words_that_bash_gives(name: str, tmp_path: Path) -> None:
    script, parameters = SCRIPTS[name], ("p1", "p 2")
    found = words_of(script, parameters)
    (tmp_path / "s.sh").write_text(BASH + script)
    command = f"bash {tmp_path}/s.sh p1 'p 2' 9>{tmp_path}/out"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=False, capture_output=True)
    lines = (tmp_path / "out").read_text().splitlines()
    assert found == [line.split("|")[:-1] for line in lines]
    assert found, "the script shows something"


def test_a_variable_that_nobody_sets_is_named() -> None:
    assert words_of('show $A "${B}/x" $(date +%s) $1') == [["$A", "$B/x", "$(date +%s)", "$1"]]


def test_a_value_of_the_machine_survives_a_second_parse() -> None:
    assert words_of('D=$HOME_OF/a; C="show $D/b"; bash -c "$C"; eval $C') == [
        ["$HOME_OF/a/b"], ["$HOME_OF/a/b"],
    ]  # fmt: skip


def test_variables_of_the_caller_count_if_the_script_does_not_set_them() -> None:
    assert words_of("TP=${TP:-2}; PP=3; show $TP $PP", TP="4", PP="5") == [["4", "3"]]


def test_a_file_that_the_script_includes_is_read(tmp_path: Path) -> None:
    (tmp_path / "vars.sh").write_text("A=7\n")
    run = ScriptRun(tmp_path)
    run.script("source vars.sh\nshow $A\nsource missing.sh")
    assert run.commands[0].words == ("show", "7")
    assert run.notes == [
        "line 3: missing.sh was not read (source): variables that it sets are unknown"
    ]


@pytest.mark.parametrize(
    "folder",
    ['"$(dirname "$0")"', '$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)', "$HERE", "."],
)
def test_a_file_in_the_folder_of_the_script_is_read(folder: str, tmp_path: Path) -> None:
    (tmp_path / "vars.sh").write_text("A=7\n")
    run = ScriptRun(tmp_path)
    run.script(f"source {folder}/vars.sh\nshow $A")
    assert (run.commands[0].words, run.notes) == (("show", "7"), [])


def test_a_file_that_sed_makes_from_a_template_is_kept(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text('{"a": CONFIG_A, "b": CONFIG_B}\n')
    script = "B=4\nsed 's/CONFIG_A/3/' t.json | sed \"s#CONFIG_B#$B#g\" > c.json"
    run = ScriptRun(tmp_path)
    run.script(script)
    assert run.files["c.json"] == '{"a": 3, "b": 4}\n'
    subprocess.run(["bash", "-c", script], cwd=tmp_path, check=True)
    assert (tmp_path / "c.json").read_text() == run.files["c.json"]


def test_nothing_is_executed(tmp_path: Path) -> None:
    file = tmp_path / "made"
    words_of(
        f"touch {file}; X=$(touch {file}); `touch {file}`; eval touch {file}; cat <<E > {file}\nE"
    )
    assert not file.exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("a\nshow 'x", "line 2: ' is not closed"),
        ("if true; then\nshow a", "line 2: the script ends inside of a block"),
        ("show a\n)", "line 2: ')' is unexpected"),
    ],
)
def test_a_script_that_cannot_be_parsed_names_the_line(script: str, message: str) -> None:
    with pytest.raises(ScriptError) as error:
        words_of(script)
    assert str(error.value) == message
