"""Programs that report their load."""

from __future__ import annotations

import errno
import os

import margay

from .fake import LOAD, NAME
from .test_sockets import Case


class Load(Case):
    def report(self, percent: int, name: margay.Target = "web.shop") -> None:
        margay.report_load(name, percent, agent=self.agent)

    def connections(self) -> int:
        return len(self.fake._connections)

    def test_a_report_is_of_the_format_and_its_connection_stays(self) -> None:
        web = self.agent.name("web.shop").id
        before = self.connections()
        self.report(40)
        self.assertEqual(self.fake.messages[-1], b"\x01\x0f\0\0\0\x28\x01\x00" + web.raw + bytes(16))
        self.report(0, margay.Prefix(web, 96))
        self.assertEqual(self.fake.messages[-1][4:8], b"\0\0\0\x60")
        self.assertEqual(self.connections(), before + 1)
        for percent in (-1, 101):
            with self.assertRaisesRegex(ValueError, "0 to 100 can"):
                self.report(percent)
        self.assertEqual(self.fake.asked.count(LOAD), 2)
        self.agent.close()
        self.report(100)
        self.assertEqual(self.fake.asked.count(LOAD), 3)

    def test_the_next_agent_is_told_and_none_is_said_to_be_absent(self) -> None:
        self.report(40)
        self.fake.kill()
        with self.assertRaises(margay.AgentDown):
            self.report(40)
        self.fake.listen()
        self.report(40)
        self.fake.kill()
        self.fake.listen()
        self.report(40)
        self.assertEqual(self.fake.answered.count(LOAD), 3)

    def test_refusals_are_said_and_end_nothing(self) -> None:
        self.report(40)
        connections = self.connections()
        self.fake.refused[LOAD] = (errno.ENOENT, "web.shop is not served by this process")
        with self.assertRaises(margay.Refused) as raised:
            self.report(30)
        self.assertEqual(raised.exception.errno, errno.ENOENT)
        self.fake.refused[LOAD] = (errno.EBADMSG, "this is no request")
        with self.assertRaisesRegex(margay.Incompatible, "takes no reports of load"):
            self.report(30)
        self.fake.refused.clear()
        self.report(30)
        self.assertEqual(self.connections(), connections)

    def test_a_child_reports_by_a_connection_of_its_own(self) -> None:
        self.report(40)
        connections = self.connections()
        asked = self.fake.asked.count(NAME)
        child = os.fork()
        if child == 0:
            try:
                self.report(30)
                os._exit(0)
            finally:
                os._exit(1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(self.fake.asked.count(NAME), asked + 1, "the child knows no names")
        self.report(20)
        self.assertGreaterEqual(self.connections(), connections)
        self.assertEqual(self.fake.answered.count(LOAD), 3)
