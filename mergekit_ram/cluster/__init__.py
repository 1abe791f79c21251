"""A merge spread over the workers of a Ray cluster, taken up again where it was stopped.

``driver`` connects and places the work, ``job`` is what a worker has to know, ``shards`` is what it
does, ``manifests`` what it leaves, ``directory`` the place for that.
"""
