//! Shells complete what the running agent knows.

mod host;

use host::{BY_HAND, Host};

/// An agent that knows something, and words for what shells say of a line whose last word is begun.
const WORDS: &str = r#"
trap 'margay down >/dev/null 2>&1 || true' EXIT
margay up --router >/dev/null
margay id authority create shop >/dev/null
margay service publish web.shop --listen 0.0.0.0:54324 >/dev/null
margay route add adm.shop drop >/dev/null
margay id token create shop >/dev/null
mkdir "$dir/bin"; ln -s "$margay_program" "$dir/bin/margay"
offers() { [[ " $(words "${@:2}") " == *" $1 "* ]] || { echo "$1 is not offered for: \
    ${*:2}"; words "${@:2}"; exit 1; }; }
"#;

/// The same lines in every shell. `words` gives its words for a line, one after another, between blanks.
const LINES: &str = r#"
config=(--config "$dir/margay.toml")
offers service ser
offers --weight service set --
offers web.shop "${config[@]}" service show w
offers web.shop "${config[@]}" trace ''
[ -z "$(words "${config[@]}" service show x)" ]
offers shop "${config[@]}" id token create ''
offers "$(margay route list | sed -n 's/^\([0-9]*\) *adm.shop .*/\1/p')" "${config[@]}" route delete ''
offers "$(margay id token list --json | sed -n 's/^ *"id": "\(.*\)",$/\1/p')" "${config[@]}" id token revoke ''
# Without an agent there are the verbs, and no words of errors.
margay down >/dev/null
offers service ser
[ -z "$(words "${config[@]}" service show w 2>&1)" ]
echo '[' >>"$dir/margay.toml"
[ -z "$(words "${config[@]}" service show w 2>&1)" ]
"#;

fn completes(words: &str) {
    Host::new(Some(BY_HAND)).boot("", &format!("{WORDS}\n{words}\n{LINES}"));
}

#[test]
fn bash_is_told_names_and_flows_of_the_agent() {
    completes(
        r#"
        source <("$margay_program" completions bash)
        words() {
            local PATH="$dir/bin:$PATH"
            COMP_WORDS=(margay "$@"); COMP_CWORD=$#; COMP_TYPE=9; COMPREPLY=()
            _clap_complete_margay margay "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}" 2>/dev/null || true
            echo "${COMPREPLY[*]-}"
        }
        "#,
    );
}

/// What the scripts of zsh and fish make of it needs those shells; this is what they ask.
#[test]
fn zsh_and_fish_are_told_the_same() {
    completes(
        r#"
        words() {
            _CLAP_COMPLETE_INDEX=$# MARGAY_COMPLETE=zsh "$margay_program" -- margay "$@" | sed 's/:.*//' | tr '\n' ' '
        }
        "#,
    );
    completes(
        r#"
        words() { MARGAY_COMPLETE=fish "$margay_program" -- margay "$@" | cut -f1 | tr '\n' ' '; }
        "#,
    );
}

#[test]
fn fish_completes() {
    if !is_there("fish") {
        return;
    }
    completes(
        r#"
        "$margay_program" completions fish >"$dir/margay.fish"
        words() {
            local line; line=$(printf '%q ' margay "$@")
            PATH="$dir/bin:$PATH" HOME=$dir fish --no-config -c \
                "source $dir/margay.fish; complete --do-complete '${line% }'" | cut -f1 | tr '\n' ' '
        }
        "#,
    );
}

fn is_there(shell: &str) -> bool {
    let is_there = std::process::Command::new(shell).arg("-c").arg("true").status().is_ok();
    if !is_there {
        eprintln!("skipped: {shell} is not installed");
    }
    is_there
}
