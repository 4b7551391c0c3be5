"""The shipped fakes of our Protocols, for tests of hpml and of code that uses it.

FakeClock       time that passes only by `sleep`
FakeRunner      a `scheduler.command.Runner` that answers from a table
FakeScheduler   a `scheduler.model.Scheduler` in memory, with faults on request (`Fault`)
Killed          raised by a fault that simulates a killed hpml
"""
