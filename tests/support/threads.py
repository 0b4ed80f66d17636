"""Functions in several threads at once."""

from __future__ import annotations

import threading


def in_threads(count, function):
    """Results of a function in so many threads; an exception counts as one."""
    results = [None] * count

    def call(place):
        try:
            results[place] = function()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[place] = error

    threads = [threading.Thread(target=call, args=(place,)) for place in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
