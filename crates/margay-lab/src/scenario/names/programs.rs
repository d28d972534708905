//! Programs that look names up, each with a resolver of its own.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::host::Host;

/// By the C library that it is linked with.
const LIBC: &str = r#"
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>

int main(int count, char **words)
{
    struct addrinfo hints = { .ai_family = AF_INET, .ai_socktype = SOCK_STREAM }, *found;
    char text[INET_ADDRSTRLEN];
    if (count != 2 || getaddrinfo(words[1], "80", &hints, &found))
        return 1;
    for (; found; found = found->ai_next)
        puts(inet_ntop(AF_INET, &((struct sockaddr_in *)found->ai_addr)->sin_addr, text, sizeof text));
    return 0;
}
"#;

/// By c-ares, as Node, curl and many others.
const C_ARES: &str = r#"
#include <ares.h>
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <sys/select.h>

static int failed;

static void hear(void *nothing, int status, int timeouts, struct hostent *found)
{
    char text[INET_ADDRSTRLEN];
    (void)nothing;
    (void)timeouts;
    failed = status != ARES_SUCCESS;
    for (char **address = failed ? NULL : found->h_addr_list; address && *address; address++)
        puts(inet_ntop(AF_INET, *address, text, sizeof text));
}

int main(int count, char **words)
{
    ares_channel channel;
    if (count != 2 || ares_library_init(ARES_LIB_INIT_ALL) || ares_init(&channel))
        return 1;
    ares_gethostbyname(channel, words[1], AF_INET, hear, NULL);
    for (;;) {
        fd_set readers, writers;
        struct timeval limit;
        FD_ZERO(&readers);
        FD_ZERO(&writers);
        int highest = ares_fds(channel, &readers, &writers);
        if (!highest)
            break;
        select(highest, &readers, &writers, NULL, ares_timeout(channel, NULL, &limit));
        ares_process(channel, &readers, &writers);
    }
    return failed;
}
"#;

const GO: &str = r#"package main

import (
	"fmt"
	"net"
	"os"
)

func main() {
	found, err := net.LookupHost(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	for _, address := range found {
		fmt.Println(address)
	}
}
"#;

/// By Java's own resolver, where there is a Java.
const JAVA: &str = r#"
import java.util.Hashtable;
import javax.naming.directory.InitialDirContext;

public class Names {
    public static void main(String[] words) throws Exception {
        Hashtable<String, String> by = new Hashtable<>();
        by.put("java.naming.factory.initial", "com.sun.jndi.dns.DnsContextFactory");
        System.out.println(new InitialDirContext(by).getAttributes(words[0], new String[] {"A"}));
    }
}
"#;

/// A program that looks one name up.
pub struct Finder {
    /// What it is called in the report.
    pub name: &'static str,
    command: String,
}

impl Finder {
    fn new(name: &'static str, command: impl Into<String>) -> Self {
        Self { name, command: command.into() }
    }

    /// What it says about a name on a host, whatever that is; `before` are words before its own.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn ask(&self, host: &Host, before: &str, name: &str) -> Result<String> {
        let script = format!("{before} {} {name}", self.command);
        let said = host.output(["bash", "-c", &script])?;
        Ok(String::from_utf8_lossy(&said.stdout).into_owned())
    }
}

/// All of them, compiled into a directory.
///
/// # Errors
///
/// A compiler is missing, or refuses.
pub fn build(dir: &Path) -> Result<Vec<Finder>> {
    let write = |name: &str, text: &str| -> Result<PathBuf> {
        let path = dir.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    };
    let (libc, ares) = (write("libc.c", LIBC)?, write("c-ares.c", C_ARES)?);
    write("go.mod", "module names\n\ngo 1.19\n")?;
    write("names.go", GO)?;
    let at = |name: &str| dir.join(name).display().to_string();
    compile(dir, "cc", &["-O1", "-o", "glibc", &libc.display().to_string()])?;
    compile(dir, "musl-gcc", &["-O1", "-static", "-o", "musl", &libc.display().to_string()])?;
    compile(dir, "cc", &["-O1", "-o", "c-ares", &ares.display().to_string(), "-lcares"])?;
    compile(dir, "go", &["build", "-o", "go", "names.go"])?;
    let mut finders = vec![
        Finder::new("glibc", at("glibc")),
        Finder::new("musl", at("musl")),
        Finder::new("c-ares", at("c-ares")),
        Finder::new("Go's own resolver", format!("GODEBUG=netdns=go {}", at("go"))),
        Finder::new("Go by the C library", format!("GODEBUG=netdns=cgo {}", at("go"))),
        Finder::new("dig", "dig +short +time=2 +tries=1 -t A"),
        Finder::new("dig +tcp", "dig +short +tcp +time=2 +tries=1 -t A"),
        Finder::new("host", "timeout 5 host -t A"),
        Finder::new("nslookup", "timeout 5 nslookup -type=A"),
    ];
    if Command::new("javac").arg("-version").output().is_ok_and(|said| said.status.success()) {
        let source = write("Names.java", JAVA)?;
        compile(dir, "javac", &["-d", &dir.display().to_string(), &source.display().to_string()])?;
        finders.push(Finder::new("Java", format!("java -cp {} Names", dir.display())));
    }
    Ok(finders)
}

fn compile(dir: &Path, compiler: &str, words: &[&str]) -> Result<()> {
    let mut command = Command::new(compiler);
    command.args(words).current_dir(dir).env("GOFLAGS", "-mod=mod").env("GOTOOLCHAIN", "local");
    let said = command.output().with_context(|| format!("{compiler} is needed (`make setup` installs it)"))?;
    if !said.status.success() {
        bail!("{compiler} {}: {}", words.join(" "), String::from_utf8_lossy(&said.stderr).trim());
    }
    Ok(())
}
