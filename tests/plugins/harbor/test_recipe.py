"""What is followed of a Dockerfile, and the line that names what is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from swift_r1.errors import UsageError
from swift_r1.plugins.harbor.recipe import Copied, Ran, read_recipe

FOLLOWED = r"""# syntax=docker/dockerfile:1
FROM host AS base
LABEL task=small
ENV COLOUR=red SIZE="very large"
ENV OLD style of it
WORKDIR /app
COPY files/ ./
copy one.txt two.txt sub/
ADD ["a name.txt", "/etc/x"]
COPY three.txt /app
RUN echo a && \
    # between
    echo b
WORKDIR inside
RUN ["touch", "a b"]
CMD ["bash"]
"""


def test_what_is_followed() -> None:
    recipe = read_recipe(FOLLOWED, "Dockerfile")
    assert (recipe.image, recipe.workdir) == ("host", "/app/inside")
    assert recipe.env == {"COLOUR": "red", "SIZE": "very large", "OLD": "style of it"}
    assert recipe.steps == [
        Copied(7, ("files/",), "/app/"),
        Copied(8, ("one.txt", "two.txt"), "/app/sub/"),
        Copied(9, ("a name.txt",), "/etc/x"),
        Copied(10, ("three.txt",), "/app/"),
        Ran(11, "echo a && echo b", "/app"),
        Ran(15, "touch 'a b'", "/app/inside"),
    ]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "USER agent",
            "USER needs a builder of images; FROM, WORKDIR, ENV, COPY, ADD, RUN are followed",
        ),
        ("FROM other", "a second FROM is a stage"),
        ("COPY --from=base /a /b", "COPY with --from=base needs a builder"),
        ("RUN --mount=type=cache true", "RUN with --mount=type=cache needs a builder"),
        ("RUN cat <<EOF > a", "RUN with a here-document is not read"),
        ("WORKDIR $HOME", "WORKDIR with a variable is not read"),
        ("COPY ../x /x", "COPY ../x leaves the folder"),
        ("COPY x", "COPY needs a source and a target"),
        ("ADD https://example.com/a /a", "ADD https://example.com/a downloads or unpacks"),
        ("ENV A=1 B", "ENV needs NAME=value"),
    ],
)
def test_what_is_refused_is_named_with_its_line(line: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_recipe(f"FROM host\n\n{line}\nRUN true\n", "t/Dockerfile")
    (fault,) = caught.value.faults
    assert fault.startswith(f"t/Dockerfile:3: {said}")


def test_every_line_that_is_refused_is_said() -> None:
    with pytest.raises(UsageError) as caught:
        read_recipe("USER a\nVOLUME b\n", "Dockerfile")
    assert [fault.partition(" needs")[0] for fault in caught.value.faults] == [
        "Dockerfile:1: USER",
        "Dockerfile:2: VOLUME",
    ]
    with pytest.raises(UsageError, match="Dockerfile: it has no FROM"):
        read_recipe("WORKDIR /app\n", "Dockerfile")


def test_the_files_of_a_copy(tmp_path: Path) -> None:
    for name in ("d/a.txt", "d/e/b.txt", "c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()

    def places(*words: str) -> list[str]:
        return [place for _, place in Copied(1, words[:-1], words[-1]).files(tmp_path)]

    assert places("d", "/app/") == ["/app/a.txt", "/app/e/b.txt"]
    assert places("c.txt", "/app/") == ["/app/c.txt"]
    assert places("c.txt", "/app/x") == ["/app/x"]
    assert places("*.txt", "d/*.txt", "/x/") == ["/x/c.txt", "/x/a.txt"]
    assert places(".", "/x/") == ["/x/c.txt", "/x/d/a.txt", "/x/d/e/b.txt"]
    with pytest.raises(UsageError, match=r"Dockerfile:1: there is no z\.txt in that folder"):
        places("z.txt", "/app/")
