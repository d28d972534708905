//! Completion in shells: what this program says of its verbs and options, and what the running agent knows of names,
//! flows and hosts (decision 0061).

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::time::Duration;

use clap::{CommandFactory, FromArgMatches};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use clap_complete::{Shell, env};
use margay_control::api::v1::*;

use super::{Cli, Client, RemoteArgs, connect, load_for_asking};

/// The variable by which a shell's script asks this program.
const VARIABLE: &str = "MARGAY_COMPLETE";
/// Somebody waits with a finger on a key.
const LIMIT: Duration = Duration::from_secs(1);
/// Flows that one list of words has.
const FLOWS_MAX: u32 = 1000;

/// What the word of an argument is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Service,
    Host,
    ServiceOrHost,
    Member,
    Flow,
    Rule,
    Resolver,
    Token,
    Authority,
    ServiceKey,
    Site,
    Router,
}

/// Verbs, their arguments, and what those are.
const PLACES: [(&str, &str, Kind); 35] = [
    ("service withdraw", "name", Kind::Service),
    ("service wait", "name", Kind::Service),
    ("service set", "name", Kind::Service),
    ("service show", "name", Kind::Service),
    ("service resolve", "name", Kind::Service),
    ("trace", "name", Kind::Service),
    ("drain", "name", Kind::Service),
    ("undrain", "name", Kind::Service),
    ("check", "peer", Kind::ServiceOrHost),
    ("flow list", "name", Kind::Service),
    ("flow watch", "name", Kind::Service),
    ("flow show", "flow", Kind::Flow),
    ("flow migrate", "flow", Kind::Flow),
    ("flow policy", "flow", Kind::Flow),
    ("flow close", "flow", Kind::Flow),
    ("stack list", "name", Kind::Service),
    ("stack show", "flow", Kind::Flow),
    ("stack set", "flow", Kind::Flow),
    ("stack release", "flow", Kind::Flow),
    ("path migrate", "peer", Kind::Host),
    ("route list", "name", Kind::Service),
    ("route add", "name", Kind::Service),
    ("route add delay", "resolver", Kind::Resolver),
    ("route change", "id", Kind::Rule),
    ("route delete", "id", Kind::Rule),
    ("router show", "name", Kind::Site),
    ("router remove", "name", Kind::Router),
    ("id authority request", "name", Kind::Authority),
    ("id authority succeed", "name", Kind::Authority),
    ("id key sign", "name", Kind::ServiceKey),
    ("id token create", "authority", Kind::Authority),
    ("id token revoke", "id", Kind::Token),
    ("id member grant", "host", Kind::Member),
    ("id member grant", "authority", Kind::Authority),
    ("id member remove", "host", Kind::Member),
];

/// Answers a shell, where one asks, and ends the process then. Must be called while the process has one thread.
pub fn answer() {
    CompleteEnv::with_factory(command).var(VARIABLE).complete();
}

/// What makes a shell ask this program, to be read by the shell.
///
/// # Errors
///
/// The shell is none that can.
pub fn script(shell: Shell) -> io::Result<Vec<u8>> {
    let shells = Shells::builtins();
    let completer = shells.completer(&shell.to_string()).ok_or(io::ErrorKind::Unsupported)?;
    let mut text = Vec::new();
    env::EnvCompleter::write_registration(completer, VARIABLE, "margay", "margay", "margay", &mut text)?;
    if shell == Shell::Zsh {
        // The file is a function that zsh loads when it is wanted for the first time: it must complete then, too.
        text.extend_from_slice(
            b"if [ \"$funcstack[1]\" = \"_margay\" ]; then _clap_dynamic_completer_margay \"$@\"; fi\n",
        );
    }
    Ok(text)
}

/// The command line, with words for arguments.
fn command() -> clap::Command {
    PLACES.iter().fold(super::command(), |command, (verb, argument, kind)| {
        let path: Vec<&str> = verb.split(' ').collect();
        with_words(command, &path, argument, *kind)
    })
}

fn with_words(command: clap::Command, path: &[&'static str], argument: &'static str, kind: Kind) -> clap::Command {
    match path {
        [] => in_written_order(command).mut_arg(argument, |known| {
            known.add(ArgValueCompleter::new(move |begun: &OsStr| candidates(begun, || words(kind))))
        }),
        [verb, rest @ ..] => command.mut_subcommand(verb, |inner| with_words(inner, rest, argument, kind)),
    }
}

/// Each argument without an option's name stays where it is: one that is changed would come last.
fn in_written_order(command: clap::Command) -> clap::Command {
    let names: Vec<clap::Id> = command.get_positionals().map(|known| known.get_id().clone()).collect();
    (1..).zip(names).fold(command, |command, (index, name)| {
        command.mut_arg(name, |known| if known.get_index().is_none() { known.index(index) } else { known })
    })
}

/// Words, each with what it is.
type Words = BTreeMap<String, String>;

/// Those that begin so.
fn candidates(begun: &OsStr, words: impl FnOnce() -> Words) -> Vec<CompletionCandidate> {
    let Some(begun) = begun.to_str() else { return Vec::new() };
    let fit = words().into_iter().filter(|(word, _)| word.starts_with(begun));
    fit.map(|(word, about)| CompletionCandidate::new(word).help((!about.is_empty()).then(|| about.into()))).collect()
}

fn words(kind: Kind) -> Words {
    // Whatever is in the way, there are no words then: somebody is in the middle of a line.
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return Words::new() };
    let known = runtime.block_on(async { tokio::time::timeout(LIMIT, ask(kind)).await });
    known.ok().flatten().unwrap_or_default()
}

/// What the agent knows that is meant by the words so far.
async fn ask(kind: Kind) -> Option<Words> {
    let line = std::env::args_os().skip_while(|word| word != "--").skip(1);
    // The line is not whole, and what is missing is no error.
    let said = Cli::command().ignore_errors(true).try_get_matches_from(line).ok()?;
    let config_path = said.get_one::<std::path::PathBuf>("config");
    let remote = RemoteArgs::from_arg_matches(&said).ok()?.given().ok()?;
    let (config, _) = load_for_asking(config_path.map(std::path::PathBuf::as_path));
    let client = connect(&config, remote.as_ref()).await.ok()?;
    Some(known(client, kind).await)
}

async fn known(client: Client, kind: Kind) -> Words {
    match kind {
        Kind::Service => services(client).await,
        Kind::Host => hosts(client).await,
        Kind::ServiceOrHost => services(client.clone()).await.into_iter().chain(hosts(client).await).collect(),
        Kind::Member => members(client).await,
        Kind::Flow => flows(client).await,
        Kind::Rule | Kind::Resolver => routes(client, kind).await,
        Kind::Token => tokens(client).await,
        Kind::Authority | Kind::ServiceKey => keys(client, kind).await,
        Kind::Site | Kind::Router => routers(client, kind).await,
    }
}

/// A host by its name, or else by its host-ID.
fn host(name: String, id: String) -> (String, String) {
    if name.is_empty() { (id, String::new()) } else { (name, id) }
}

/// Served here, registered here, and in use here.
async fn services(mut client: Client) -> Words {
    let mut words = Words::new();
    if let Ok(reply) = client.service_list(ServiceListRequest {}).await {
        let reply = reply.into_inner();
        words.extend(reply.registered.into_iter().map(|found| (found.name, format!("on {}", found.host_name))));
        words.extend(reply.waiting.into_iter().map(|waiting| (waiting.name, "waits for a program".to_owned())));
        words.extend(reply.services.into_iter().map(|own| (own.name, "on this host".to_owned())));
    }
    let request = FlowListRequest { limit: FLOWS_MAX, ..FlowListRequest::default() };
    if let Ok(reply) = client.flow_list(request).await {
        for flow in reply.into_inner().flows {
            words.entry(flow.name).or_insert_with(|| "in use".to_owned());
        }
    }
    words.remove("");
    words
}

async fn hosts(mut client: Client) -> Words {
    let reply = client.path_list(PathListRequest {}).await.map(tonic::Response::into_inner).unwrap_or_default();
    let met = reply.paths.into_iter().map(|path| host(path.peer_name, path.peer));
    met.chain(members(client).await).collect()
}

async fn members(mut client: Client) -> Words {
    let reply = client.member_list(MemberListRequest {}).await.map(tonic::Response::into_inner).unwrap_or_default();
    reply.members.into_iter().map(|member| host(member.host_name, member.host_id)).collect()
}

async fn flows(mut client: Client) -> Words {
    let request = FlowListRequest { limit: FLOWS_MAX, ..FlowListRequest::default() };
    let reply = client.flow_list(request).await.map(tonic::Response::into_inner).unwrap_or_default();
    let about = |flow: &FlowInfo| format!("{} {} {}", flow.name, flow.remote, flow.lifecycle).trim().to_owned();
    reply.flows.into_iter().map(|flow| (flow.flow.clone(), about(&flow))).collect()
}

async fn routes(mut client: Client, kind: Kind) -> Words {
    let request = RouteListRequest::default();
    let reply = client.route_list(request).await.map(tonic::Response::into_inner).unwrap_or_default();
    if kind == Kind::Resolver {
        return reply.resolvers.into_iter().map(|resolver| (resolver.name, resolver.kind)).collect();
    }
    let own = reply.routes.into_iter().filter(|route| route.origin == "operator");
    own.map(|route| (route.id.to_string(), format!("{} {} {}", route.name, route.action, route.to))).collect()
}

async fn tokens(mut client: Client) -> Words {
    let reply = client.token_list(TokenListRequest {}).await.map(tonic::Response::into_inner).unwrap_or_default();
    reply.tokens.into_iter().map(|token| (token.id, format!("{}, {}", token.authority, token.state))).collect()
}

async fn keys(mut client: Client, kind: Kind) -> Words {
    let reply = client.identity(IdentityRequest {}).await.map(tonic::Response::into_inner).unwrap_or_default();
    if kind == Kind::ServiceKey {
        return reply.service_keys.into_iter().map(|key| (key.name, key.service_id)).collect();
    }
    reply.authorities.into_iter().map(|authority| (authority.name, String::new())).collect()
}

async fn routers(mut client: Client, kind: Kind) -> Words {
    if kind == Kind::Site {
        let reply =
            client.router_list(RouterListRequest::default()).await.map(tonic::Response::into_inner).unwrap_or_default();
        return reply.neighbours.into_iter().map(|neighbour| (neighbour.site, neighbour.relation)).collect();
    }
    let reply = client.status(StatusRequest {}).await.map(tonic::Response::into_inner).unwrap_or_default();
    let of_cluster = reply.cluster.map(|cluster| cluster.routers).unwrap_or_default();
    of_cluster.into_iter().map(|router| host(router.name, router.host_id)).collect()
}

#[cfg(test)]
mod test {
    use super::*;

    fn completed(line: &[&str]) -> Vec<String> {
        let words = line.iter().map(Into::into).collect();
        let found = clap_complete::engine::complete(&mut command(), words, line.len() - 1, None);
        let text = |found: &CompletionCandidate| found.get_value().to_string_lossy().into_owned();
        found.expect("a line").iter().map(text).collect()
    }

    #[test]
    fn verbs_and_options_need_no_agent() {
        assert_eq!(completed(&["margay", "serv"]), ["service"]);
        assert_eq!(completed(&["margay", "flow", "list", "--lim"]), ["--limit"]);
    }

    #[test]
    fn arguments_stay_in_their_order() {
        let order = |mut command: clap::Command, verb: &str| -> Vec<(String, Option<usize>)> {
            command.build();
            let verb = verb.split(' ').fold(&command, |inner, word| inner.find_subcommand(word).expect("a verb"));
            let mut order: Vec<_> =
                verb.get_positionals().map(|known| (known.get_id().to_string(), known.get_index())).collect();
            order.sort();
            order
        };
        for (verb, _, _) in PLACES {
            assert_eq!(order(command(), verb), order(crate::cli::command(), verb), "{verb}");
        }
    }

    #[test]
    fn words_that_begin_otherwise_are_left_out() {
        let words = || Words::from([("web.shop".to_owned(), "on this host".to_owned()), ("db.shop".into(), "".into())]);
        let found = candidates(OsStr::new("w"), words);
        let [only] = &found[..] else { panic!("{found:?}") };
        assert_eq!(only.get_value(), "web.shop");
        assert_eq!(only.get_help().map(ToString::to_string).as_deref(), Some("on this host"));
        assert_eq!(candidates(OsStr::new(""), words).len(), 2);
    }

    #[test]
    fn every_shell_that_is_named_has_a_script() {
        for shell in <Shell as clap::ValueEnum>::value_variants() {
            let text = String::from_utf8(script(*shell).expect("a script")).expect("text");
            assert!(text.contains(VARIABLE) && text.contains("margay"), "{shell}: {text}");
        }
    }
}
