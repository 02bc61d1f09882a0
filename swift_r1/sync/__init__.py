"""A push: weights on their way from the trainer to an engine, both halves of the protocol.

    trainer, rank 0                                       server
    ---------------                                       ------
    gathers a bucket, keeps it (`snapshot`)
    takes the lease           --POST lease-->             idle -> leased
    begins N+1                --POST begin-->             leased -> open
    sends each bucket         --PUT bucket, POST file-->  open: staged and hashed (`staging`), passed on (`server`)
       (`writer`, `transport`)--POST stream-->            open: loaded as it comes, by NCCL or out of a GPU's memory
    commits the content hash  --POST commit-->            open -> loading -> leased, serves N+1
    renews the lease          --POST lease-->             after a silence: idle, the update is dropped

`update` has the server's states with what may go wrong in each, `_Delivery` in `writer` the ways that a bucket goes
instead where one fails, and `rollout/pool/health.py` what becomes of a server that is lost in a push. `buckets` has the
bytes, their hashes and changes, which both halves use.
"""
