"""Small notebooks for the tests of the tools."""
import json

TITLE = {"cell_type": "markdown", "id": "title", "metadata": {}, "source": "# Page\n\n> One line."}


def cell(source, cell_id=None, outputs=(), **more):
    made = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": list(outputs), "source": source, **more}
    return made if cell_id == "" else {**made, "id": cell_id or f"c{abs(hash(source)) % 10**8}"}


def write_notebook(path, *cells, first=TITLE):
    path.parent.mkdir(parents=True, exist_ok=True)
    kernel = {"kernelspec": {"display_name": "python3", "language": "python", "name": "python3"}}
    book = {"cells": [first, *cells], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps(book, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    return path
