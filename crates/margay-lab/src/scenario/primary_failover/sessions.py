#!/usr/bin/env python3
"""Sessions of PostgreSQL that write, and such as wait, until they are killed: what becomes of each is a line of JSON.

    sessions.py GROUP HOST PORT BUSY IDLE

An idle session has written one row, and waits for its connection's end. Each session that has ended connects again
until a row of its own is acknowledged; a busy one goes on with that, an idle one waits again.
"""

import json
import select
import sys
import threading
import time

import psycopg2

GROUP, HOST, PORT, BUSY, IDLE = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
# Of a busy session, from one row to the next; and of any, from one try to connect to the next.
EVERY_S = 0.05
AGAIN_S = 0.1
# The server says which one it is.
INSERT = "insert into rows (said) values (%s) returning current_setting('cluster_name')"
printing = threading.Lock()


def say(session, kind, **more):
    line = {"group": GROUP, "session": session, "kind": kind, "at_ms": time.time() * 1e3, **more}
    with printing:
        print(json.dumps(line), flush=True)


def connect():
    connection = psycopg2.connect(host=HOST, port=PORT, user="postgres", dbname="postgres", connect_timeout=2)
    connection.autocommit = True
    return connection


def write(session, connection):
    with connection.cursor() as cursor:
        cursor.execute(INSERT, (f"{GROUP}-{session}",))
        say(session, "written", server=cursor.fetchone()[0])


def wait_for_end(connection):
    # Nothing comes of a session that asks nothing, but its end.
    select.select([connection.fileno()], [], [])
    with connection.cursor() as cursor:
        cursor.execute("select 1")
    raise psycopg2.OperationalError("the server has said something to a session that asked nothing")


def go_on(session, is_busy):
    while True:
        connection = None
        try:
            connection = connect()
            write(session, connection)
            say(session, "open")
            while is_busy:
                time.sleep(EVERY_S)
                write(session, connection)
            wait_for_end(connection)
        except psycopg2.Error as error:
            say(session, "failed", text=" ".join(str(error).split()))
        finally:
            if connection is not None:
                connection.close()
        time.sleep(AGAIN_S)


for number in range(BUSY + IDLE):
    threading.Thread(target=go_on, args=(number, number < BUSY), daemon=True).start()
threading.Event().wait()
