//! A PostgreSQL server of a host, as Debian packages it, with a directory of its own.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

use crate::host::Host;
use crate::program::{Program, wait_for};

/// A server is made, or copied, and started.
const READY_LIMIT: Duration = Duration::from_secs(30);

/// What each script begins with. The server refuses to be root.
const PRELUDE: &str = r#"
    set -euo pipefail
    programs=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
    mkdir -p database
    chown postgres database
    cd database
    as=(setpriv --reuid=postgres --regid=postgres --clear-groups)
    server=("${as[@]}" "$programs/postgres" -D data -p 5432 -c "listen_addresses=*" -c unix_socket_directories=
        -c fsync=off)
"#;
const PRIMARY: &str = r#"
    "${as[@]}" "$programs/initdb" -D data -A trust -U postgres
    printf 'host all all all trust\nhost replication all all trust\n' >> data/pg_hba.conf
    exec "${server[@]}" -c cluster_name=db1
"#;
const STANDBY: &str = r#"
    "${as[@]}" "$programs/pg_basebackup" -h "$PRIMARY" -p 5432 -U postgres -D data -R -X stream -c fast
    exec "${server[@]}" -c cluster_name=db2
"#;
/// It says when the host holds the name, before anything else happens.
const PROMOTE: &str = r#"
    margay service wait "$SERVICE"
    echo "held $(date +%s%3N)"
    "${as[@]}" "$programs/pg_ctl" -D data promote -w
    echo promoted
"#;
const POOLER: &str = r#"
    mkdir -p pooler
    chown postgres pooler
    cd pooler
    printf '%s\n' '[databases]' "postgres = host=$NAME port=5432 user=postgres" '[pgbouncer]' \
        'listen_addr = 127.0.0.1' 'listen_port = 6432' 'unix_socket_dir =' 'auth_type = any' 'pool_mode = session' \
        'server_login_retry = 0.2' 'server_connect_timeout = 2' 'query_wait_timeout = 2' > pooler.ini
    exec setpriv --reuid=postgres --regid=postgres --clear-groups pgbouncer pooler.ini
"#;

/// A server that runs.
pub struct Database<'a> {
    /// Its host.
    pub host: &'a Host,
    _server: Program,
}

impl<'a> Database<'a> {
    /// A new one, with a table of rows.
    pub fn primary(host: &'a Host) -> Result<Self> {
        let this = Self { host, _server: start(host, "database", PRIMARY, &[])? };
        this.await_answer("select 1", "1")?;
        host.run(psql("create table rows (number serial, said text)"))?;
        Ok(this)
    }

    /// One that follows the primary at an address.
    pub fn standby(host: &'a Host, primary: &str) -> Result<Self> {
        let this = Self { host, _server: start(host, "database", STANDBY, &[("PRIMARY", primary)])? };
        this.await_answer("select pg_is_in_recovery() and count(*) = 1 from pg_stat_wal_receiver", "t")?;
        Ok(this)
    }

    fn await_answer(&self, query: &str, wanted: &str) -> Result<()> {
        wait_for(&format!("the server of {}", self.host.name()), READY_LIMIT, || {
            let said = self.host.run(psql(query))?;
            ensure!(said.trim() == wanted, "it says {said}");
            Ok(())
        })
    }

    /// Waits, beside the scenario, until the host holds a name, and makes its server the primary then.
    pub fn promote_when_held(&self, service: &str) -> Result<Program> {
        start(self.host, "promoter", PROMOTE, &[("SERVICE", service)])
    }
}

/// When a promoter's host has held the name, in milliseconds since 1970, once the server is the primary.
pub fn promoted_ms(promoter: &Program) -> Result<f64> {
    let said = promoter.log();
    ensure!(said.lines().any(|line| line == "promoted"), "{said}");
    let held = said.lines().find_map(|line| line.strip_prefix("held "));
    held.context("it has not said when")?.parse().context("it says no time")
}

/// A pooler on a client, which goes to the server by name; none where it is not installed.
pub fn pooler(host: &Host, name: &str) -> Result<Option<Program>> {
    if host.shell("command -v pgbouncer").is_err() {
        return Ok(None);
    }
    let pooler = start(host, "pooler", POOLER, &[("NAME", name)])?;
    wait_for("the pooler", READY_LIMIT, || {
        let listening = host.run(["ss", "-Hltn", "sport = :6432"])?;
        if listening.trim().is_empty() { bail!("{}", pooler.log()) } else { Ok(()) }
    })?;
    Ok(Some(pooler))
}

fn psql(query: &str) -> [&str; 10] {
    ["psql", "-h", "127.0.0.1", "-p", "5432", "-U", "postgres", "-Atc", query, "postgres"]
}

fn start(host: &Host, log: &str, script: &str, variables: &[(&str, &str)]) -> Result<Program> {
    let whole = format!("cd \"$OWN\"\n{PRELUDE}{script}");
    let mut command = host.command(["bash", "-c", &whole]);
    command.env("OWN", &host.dir).envs(variables.iter().copied());
    Program::start(command, &host.dir.join(format!("{log}.log")))
}
