"""An update by several processes: all run the same job, and work marked for a role runs on that role's ranks.

    freight   what crosses between ranks, as bytes           group    the process group, and who is lost
    team      lanes over several processes                   shards   a base of which every rank holds a part
    orders    what the first rank tells the others           crew     the other processes, from the first one's side
    member    one of the others                              leader   the train worker: who is needed for a job
    waiting   calls that wait for another process

A rank is a process on a device; rank 0 is the train worker. All ranks run `engine.train.job.compute` on the same job.
They see the same answers in the same order, so they decide alike, and what one of them has computed is given to all
whose own copy of it is needed. Results are put together in the order of the work and not of the ranks, so an update by
several processes that compute with as many threads a lane as one would gives the same bytes on a CPU as that one.
"""
