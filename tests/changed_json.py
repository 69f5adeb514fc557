"""JSON with one value replaced: files that say something other than what was written."""

import json


def places(value, path=()):
    """The paths of all values in a tree of JSON; of a list only the first two."""
    yield path
    inner = value.items() if isinstance(value, dict) else ()
    for key, one in list(enumerate(value[:2])) if isinstance(value, list) else inner:
        yield from places(one, (*path, key))


def changed(text, path, new):
    """The text, with the value at `path` replaced."""
    value = json.loads(text)
    if not path:
        return json.dumps(new)
    inner = value
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return json.dumps(value)
