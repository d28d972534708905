//! Filters of chains: libpcap compiles the expression, by tcpdump, where the policy is applied.

use std::process::Command;

use margay_control::chains::FILTER_LEN_MAX;
use margay_core::chain::Program;

/// The program that a filter's expression stands for, as `PolicyChain.filter_program` has it.
///
/// # Errors
///
/// What is wrong with it, or with this host; for people, without the place.
pub fn compile(text: &str) -> Result<Vec<u8>, String> {
    if text.trim().is_empty() {
        return Err("an empty filter describes every packet; leave the word `filter` out".to_owned());
    }
    if text.len() > FILTER_LEN_MAX {
        return Err(format!("the filter has {} characters; at most {FILTER_LEN_MAX} are allowed", text.len()));
    }
    let tcpdump = Command::new("tcpdump").args(["-ddd", "-y", "RAW", "--", text]).env("LC_ALL", "C").output();
    let output = tcpdump.map_err(|error| {
        format!(
            "tcpdump, by which filters are compiled, cannot be run here ({error}); install it on the host where \
             policies are applied"
        )
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().next_back().unwrap_or("it says nothing");
        return Err(format!("the filter does not compile: {}", said.trim_start_matches("tcpdump: ")));
    }
    let listing = String::from_utf8_lossy(&output.stdout);
    let program = read(&listing).ok_or_else(|| {
        format!("tcpdump says no program, but {:?}; is another program of this name installed?", first_words(&listing))
    })?;
    Program::parse(&program).map_err(|why| format!("the filter cannot be used: {why}"))?;
    Ok(program)
}

fn first_words(listing: &str) -> String {
    listing.chars().take(40).collect()
}

/// What `tcpdump -ddd` prints: how many instructions, then each in decimal numbers, a line each.
fn read(listing: &str) -> Option<Vec<u8>> {
    let mut lines = listing.lines();
    let count: usize = lines.next()?.trim().parse().ok()?;
    let mut program = Vec::new();
    for line in lines {
        let mut words = line.split_whitespace();
        program.extend(words.next()?.parse::<u16>().ok()?.to_be_bytes());
        program.extend([words.next()?.parse::<u8>().ok()?, words.next()?.parse::<u8>().ok()?]);
        program.extend(words.next()?.parse::<u32>().ok()?.to_be_bytes());
        if words.next().is_some() {
            return None;
        }
    }
    (program.len() == count * 8).then_some(program)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_listing_is_read_as_instructions() {
        let wanted = [0, 48, 0, 0, 0, 0, 0, 0, 0, 6, 1, 2, 0, 4, 0, 0];
        assert_eq!(read("2\n48 0 0 0\n6 1 2 262144\n").as_deref(), Some(&wanted[..]));
        for wrong in ["", "x", "2\n6 0 0 0\n", "1\n6 0 0\n", "1\n6 0 0 0 0\n", "1\n6 0 256 0\n", "1\n6 0 0 -1\n"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
    }

    #[test]
    fn what_is_no_filter_is_refused_before_anything_is_run() {
        assert!(compile(" ").expect_err("empty").contains("leave the word"));
        assert!(compile(&"x".repeat(1025)).expect_err("long").contains("1025 characters"));
    }
}
