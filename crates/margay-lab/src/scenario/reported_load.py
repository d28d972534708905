"""Serves a name and reports its load: the next one with each SIGUSR1. After the last it leaves the agent."""

import signal
import sys

import margay

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
name, *percents = sys.argv[1:]
agent = margay.Agent.shared()
try:
    margay.report_load(name, 1)
    sys.exit("a report of a name that this program does not serve was taken")
except margay.Refused:
    pass
with margay.listen(name):
    for percent in percents:
        margay.report_load(name, int(percent))
        signal.sigwait([signal.SIGUSR1])
    agent.close()
    signal.sigwait([signal.SIGUSR1])
