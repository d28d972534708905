//! `[router.etcd]`: what several routers share.

use std::path::PathBuf;

use margay_control::cluster::ClusterConfig;
use serde::Deserialize;
use zeroize::Zeroizing;

use crate::fields;

/// `[router.etcd]`
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdSection {
    /// The members of etcd: `http://HOST:PORT`, or all of them `https://HOST:PORT`.
    pub endpoints: Vec<String>,
    /// What all keys of this cluster begin with.
    #[serde(default = "default_prefix")]
    pub prefix: String,
    /// Certificates of who signs for etcd's members, PEM.
    #[serde(default, deserialize_with = "fields::some_absolute")]
    pub ca: Option<PathBuf>,
    /// This router's certificate for etcd, PEM.
    #[serde(default, deserialize_with = "fields::some_absolute")]
    pub certificate: Option<PathBuf>,
    /// Its key, PEM.
    #[serde(default, deserialize_with = "fields::some_absolute")]
    pub key: Option<PathBuf>,
    /// User of etcd.
    #[serde(default)]
    pub user: Option<String>,
    /// A file that holds the user's password.
    #[serde(default, deserialize_with = "fields::some_absolute")]
    pub password_file: Option<PathBuf>,
}

fn default_prefix() -> String {
    "/margay".to_owned()
}

fn is_endpoint(text: &str, scheme: &str) -> bool {
    let rest = text.strip_prefix(scheme).map(|rest| rest.trim_end_matches('/'));
    rest.is_some_and(|rest| margay_control::token::check_address(rest).is_ok())
}

impl EtcdSection {
    /// What is wrong with it as a whole, and what to do.
    pub fn check(&self) -> Result<(), (String, String)> {
        let wrong = |what: &str, advice: &str| Err((what.to_owned(), advice.to_owned()));
        if self.endpoints.is_empty() {
            return wrong(
                "names no member of etcd",
                "write endpoints = [\"http://10.0.0.11:2379\", …], one for each member",
            );
        }
        let are_all = |scheme| self.endpoints.iter().all(|endpoint| is_endpoint(endpoint, scheme));
        let is_secure = are_all("https://");
        if !is_secure && !are_all("http://") {
            return wrong(
                "has `endpoints` that are no URLs with a port, all of one kind",
                "write http://10.0.0.11:2379 for each, or https:// for each",
            );
        }
        let is_path = self.prefix.starts_with('/') && self.prefix.len() > 1 && !self.prefix.ends_with('/');
        if !is_path || self.prefix.contains("//") {
            return wrong("has a `prefix` that is no path", "write for example \"/margay/shop\"");
        }
        if is_secure && self.ca.is_none() {
            return wrong("does not say who signs for etcd's members", "add `ca`: a file with certificates, PEM");
        }
        if !is_secure && (self.ca.is_some() || self.certificate.is_some()) {
            return wrong("has certificates, which are for https:// endpoints", "write https://, or remove them");
        }
        if self.certificate.is_some() != self.key.is_some() {
            return wrong(
                "has a certificate without its key, or a key without its certificate",
                "name both `certificate` and `key`, or neither",
            );
        }
        if self.user.is_some() != self.password_file.is_some() {
            return wrong(
                "has a user without a password, or a password without a user",
                "name both `user` and `password_file`, or neither",
            );
        }
        Ok(())
    }

    /// As the control plane takes it.
    ///
    /// # Errors
    ///
    /// The file with the password cannot be read; says which.
    pub fn cluster(&self) -> Result<ClusterConfig, String> {
        let user = match (&self.user, &self.password_file) {
            (Some(user), Some(path)) => {
                let text = std::fs::read_to_string(path).map(Zeroizing::new);
                let text = text.map_err(|error| format!("the password of etcd in {}: {error}", path.display()))?;
                Some((user.clone(), Zeroizing::new(text.trim_end().to_owned())))
            }
            _ => None,
        };
        Ok(ClusterConfig {
            endpoints: self.endpoints.clone(),
            prefix: self.prefix.clone(),
            user,
            ca: self.ca.clone(),
            identity: self.certificate.clone().zip(self.key.clone()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(text: &str) -> EtcdSection {
        toml::from_str(text).expect("read")
    }

    #[test]
    fn what_contradicts_itself_is_refused_with_advice() {
        let fine = [
            "endpoints = [\"http://e1:2379\", \"http://[fd00::1]:2379/\"]\nuser = \"u\"\npassword_file = \"/p\"",
        ]
        .into_iter()
        .chain([
            "endpoints = [\"https://e1:2379\"]\nca = \"/c\"\ncertificate = \"/c\"\nkey = \"/k\"\nprefix = \"/a/b\"",
        ]);
        for text in fine {
            assert_eq!(section(text).check(), Ok(()), "{text}");
        }
        for (text, what) in [
            ("endpoints = []", "no member"),
            ("endpoints = [\"e1:2379\"]", "URLs"),
            ("endpoints = [\"http://e1\"]", "URLs"),
            ("endpoints = [\"http://e1:2379\", \"https://e2:2379\"]", "one kind"),
            ("endpoints = [\"https://e1:2379\"]", "who signs"),
            ("endpoints = [\"http://e1:2379\"]\nca = \"/c\"", "https"),
            ("endpoints = [\"https://e1:2379\"]\nca = \"/c\"\nkey = \"/k\"", "both"),
            ("endpoints = [\"http://e1:2379\"]\nuser = \"u\"", "password"),
            ("endpoints = [\"http://e1:2379\"]\nprefix = \"margay\"", "path"),
            ("endpoints = [\"http://e1:2379\"]\nprefix = \"/\"", "path"),
        ] {
            let (found, advice) = section(text).check().expect_err(text);
            assert!(format!("{found} {advice}").contains(what), "{text}: {found} {advice}");
        }
    }

    #[test]
    fn the_password_is_read_from_its_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("p");
        let text = format!("endpoints = [\"http://e:1\"]\nuser = \"u\"\npassword_file = {path:?}");
        assert!(section(&text).cluster().expect_err("not there").contains("the password of etcd"));
        std::fs::write(&path, "secret\n").expect("written");
        let (user, password) = section(&text).cluster().expect("read").user.expect("given");
        assert_eq!((user.as_str(), password.as_str()), ("u", "secret"));
    }
}
