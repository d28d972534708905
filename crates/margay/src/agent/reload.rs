//! The configuration, read again while the agent runs: what can change does, the rest is named (decision 0050).

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use margay_control::api::v1::{ReloadReply, ReloadRequest};
use margay_control::registration::Home;
use margay_datapath::seal;
use parking_lot::RwLock;
use tokio::sync::{Mutex, Notify};

use super::active::configured::rules;
use super::network::{self, Look};
use super::service::Publication;
use super::{Agent, Publishing, chain, home, stack_rules};
use crate::config::{Config, ConfigError, DEFAULT_PATH};
use crate::config_changes::{self, Needs};
use crate::log;

/// What the command line of an agent says.
#[derive(Clone, Debug, Default)]
pub struct StartedWith {
    /// `--config`, an absolute path.
    pub config_path: Option<PathBuf>,
    /// `--router`.
    pub router: bool,
}

impl StartedWith {
    /// The file that is read.
    fn path(&self) -> &Path {
        self.config_path.as_deref().unwrap_or(Path::new(DEFAULT_PATH))
    }

    /// What holds when an agent starts so now.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or its content is wrong.
    #[expect(clippy::result_large_err, reason = "made once, and shown")]
    fn load(&self) -> Result<Config, ConfigError> {
        let mut config = Config::load_written(self.config_path.as_deref())?;
        config.router.enabled |= self.router;
        Ok(config)
    }

    fn arguments(&self) -> Vec<OsString> {
        let config = self.config_path.iter().flat_map(|path| ["--config".into(), path.clone().into_os_string()]);
        let router = self.router.then(|| "--router".into());
        std::iter::once("agent".into()).chain(config).chain(router).collect()
    }
}

/// What a running agent was told, and how that changes.
pub struct Configuration {
    effective: RwLock<Arc<Config>>,
    /// Held while it is read again.
    source: Mutex<StartedWith>,
    is_to_restart: AtomicBool,
    restart: Notify,
}

impl Configuration {
    /// As an agent starts.
    pub fn new(config: Config, source: StartedWith) -> Self {
        Self {
            effective: RwLock::new(Arc::new(config)),
            source: Mutex::new(source),
            is_to_restart: AtomicBool::new(false),
            restart: Notify::new(),
        }
    }

    /// What holds now.
    pub fn now(&self) -> Arc<Config> {
        Arc::clone(&self.effective.read())
    }

    /// The file that was named, if one was.
    pub async fn path(&self) -> Option<PathBuf> {
        self.source.lock().await.config_path.clone()
    }

    /// Ends when the agent is to start again.
    pub async fn restart(&self) {
        self.restart.notified().await;
    }

    /// Whether it is to start again.
    pub fn is_to_restart(&self) -> bool {
        self.is_to_restart.load(Ordering::Relaxed)
    }

    /// Runs this program again as an agent, in place of this process. Gives why it cannot.
    pub async fn begin_again(&self) -> std::io::Error {
        let mut command = Command::new("/proc/self/exe");
        command.args(self.source.lock().await.arguments());
        if let Some(name) = std::env::args_os().next() {
            command.arg0(name);
        }
        // Whoever waited for the first start has gone since, and taken the socket along.
        if std::env::var_os("NOTIFY_SOCKET").is_some_and(|at| Path::new(&at).is_absolute() && !Path::new(&at).exists())
        {
            command.env_remove("NOTIFY_SOCKET");
        }
        command.exec()
    }
}

/// Reads the file again, or another one.
///
/// # Errors
///
/// What is wrong with the file, or with its content on this host; nothing has changed then.
pub async fn reload(agent: &Arc<Agent>, order: &ReloadRequest) -> Result<ReloadReply, String> {
    let mut source = agent.process.configuration.source.lock().await;
    let mut next = source.clone();
    next.router |= order.router;
    if !order.config_path.is_empty() && Path::new(&order.config_path) != source.path() {
        next.config_path = Some(trusted(Path::new(&order.config_path))?);
    }
    let wanted = next.load().map_err(|error| brief(&error))?;
    let before = agent.config();
    let keys = |needs| {
        let of = config_changes::between(&before, &wanted).filter(move |key| key.needs == needs);
        of.map(|key| key.name.to_owned()).collect::<Vec<_>>()
    };
    let (changed, need_restart, need_down) = (keys(Needs::Nothing), keys(Needs::Restart), keys(Needs::Down));
    if order.restart && !need_down.is_empty() {
        return Err(format!(
            "{} cannot change by a restart of the agent: `margay down`, then `margay up`; connections of this host end",
            need_down.join(", ")
        ));
    }
    let effective = config_changes::effective(&before, &wanted);
    apply(agent, &before, effective).await?;
    agent.publishing.ensembles.configure(&agent.config(), next.config_path.clone());
    *source = next;
    let restarts = order.restart && !need_restart.is_empty();
    if restarts {
        agent.process.configuration.is_to_restart.store(true, Ordering::Relaxed);
        agent.process.configuration.restart.notify_one();
    }
    let config_path = source.path().display().to_string();
    tracing::info!(
        file = config_path,
        ?changed,
        ?need_restart,
        ?need_down,
        restarts,
        "the configuration is read again"
    );
    Ok(ReloadReply { config_path, changed, need_restart, need_down, restarts })
}

/// A file that an operator names: who is none must not make this agent obey a file of his, nor be told what a file of
/// root's says.
fn trusted(path: &Path) -> Result<PathBuf, String> {
    if !path.is_absolute() {
        return Err(format!("{} is no absolute path", path.display()));
    }
    let about = std::fs::metadata(path).map_err(|error| format!("cannot read {}: {error}", path.display()))?;
    let is_own = about.uid() == 0 || about.uid() == nix::unistd::geteuid().as_raw();
    if !is_own || about.mode() & 0o022 != 0 || !about.is_file() {
        return Err(format!(
            "{} is not taken for a configuration: it must be a file of root's that nobody else may write",
            path.display()
        ));
    }
    Ok(path.to_owned())
}

fn brief(error: &ConfigError) -> String {
    match error {
        ConfigError::Wrong(misread) => misread.brief(),
        ConfigError::Unreadable { advice, .. } => format!("{error}; {advice}"),
    }
}

fn publications(config: &Config) -> Vec<Publication> {
    config.service.iter().filter_map(|section| Publication::of_section(section.get_ref())).collect()
}

/// What may be refused comes first.
async fn apply(agent: &Arc<Agent>, before: &Config, now: Config) -> Result<(), String> {
    let token = if before.join == now.join { None } else { home::token(&now).map_err(|error| error.to_string())? };
    agent.process.metrics.listen(agent, now.metrics.listen).await.map_err(|error| error.to_string())?;
    if let Err(why) = resolve_and_serve(agent, before, &now).await {
        if let Err(error) = agent.process.metrics.listen(agent, before.metrics.listen).await {
            tracing::error!(%error, "metrics cannot be served where they were");
        }
        return Err(why);
    }
    set_core(agent, before, &now);
    agent.connections.programs.configure(&now);
    log::set_level(&now.log);
    let are_cards_others = before.inside != now.inside;
    *agent.process.configuration.effective.write() = Arc::new(now);
    agent.publishing.health.reconsider();
    if before.required() != agent.config().required() {
        tokio::task::block_in_place(|| chain::renew(agent));
    }
    agent.names.fallbacks.configure(&agent.config());
    if are_cards_others {
        network::refresh(agent, Look::Changed).await;
    }
    if let Some(token) = token {
        let wanted = home::config_of(&agent.config(), token);
        let is_known = |home: &Arc<Home>| {
            (home.config().router_key, &home.config().authority) == (wanted.router_key, &wanted.authority)
        };
        if !agent.publishing.services.homes().iter().any(is_known) {
            home::add(agent, wanted);
        }
    }
    Ok(())
}

async fn resolve_and_serve(agent: &Arc<Agent>, before: &Config, now: &Config) -> Result<(), String> {
    let resolvers = &agent.routing.rules.resolvers;
    resolvers.configure(agent, before, now).await?;
    let served = serve(&agent.publishing, before, now).await;
    if served.is_err()
        && let Err(error) = resolvers.configure(agent, now, before).await
    {
        tracing::error!(error, "the resolvers of before cannot be put back");
    }
    served
}

async fn serve(publishing: &Publishing, before: &Config, now: &Config) -> Result<(), String> {
    let (former, published) = (publications(before), publications(now));
    publishing.services.configure(&former, &published).await.map_err(|error| error.to_string())?;
    let followed = tokio::task::block_in_place(|| {
        publishing.active.configure(&rules(before), &rules(now)).and_then(|()| publishing.active.follow_orders())
    });
    if followed.is_err()
        && let Err(error) = publishing.services.configure(&published, &former).await
    {
        tracing::error!(%error, "what was published before cannot be put back");
    }
    followed
}

fn set_core(agent: &Agent, before: &Config, now: &Config) {
    agent.core.0.with_sal(|sal, at| {
        if before.secure_names() != now.secure_names() {
            sal.set_secure(seal::ciphers(), now.secure, now.secure_names());
        }
        if before.policies() != now.policies() {
            sal.set_policies(now.policies());
        }
        if before.stack_rule != now.stack_rule {
            sal.set_stack_rules(at, now.stack_rules(&stack_rules::host_name(now)));
            agent.process.watchers.judging().note_rules();
        }
        if before.ad_hoc.relay != now.ad_hoc.relay {
            sal.set_relay(at, now.ad_hoc.relay);
        }
        if before.ad_hoc.flood != now.ad_hoc.flood {
            sal.set_notices(at, now.floods());
        }
        sal.set_give_up_after(now.host.give_up_after.map(|patience| patience.0));
    });
}
