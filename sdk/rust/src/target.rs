//! What may stand for a service where a call wants one.

use margay_core::name::{Name, Prefix, ServiceId};

use crate::error::Error;

/// A service, or all services under a prefix, as it was named.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// The bits.
    pub prefix: Prefix,
    /// The name as it is written, where it was given so: what lists show.
    pub written: Option<String>,
}

/// What can be given where a service is meant: a written name (`"web.shop"`), a [`Name`], a [`ServiceId`], a
/// [`Prefix`].
pub trait ToTarget {
    /// The service.
    ///
    /// # Errors
    /// [`Error::Name`] where a text is not a name.
    fn to_target(&self) -> Result<Target, Error>;
}

impl ToTarget for str {
    fn to_target(&self) -> Result<Target, Error> {
        self.parse::<Name>()?.to_target()
    }
}

impl ToTarget for String {
    fn to_target(&self) -> Result<Target, Error> {
        self.as_str().to_target()
    }
}

impl ToTarget for Name {
    fn to_target(&self) -> Result<Target, Error> {
        Ok(Target { prefix: self.prefix(), written: Some(self.written().to_owned()) })
    }
}

impl ToTarget for ServiceId {
    fn to_target(&self) -> Result<Target, Error> {
        Prefix::from(*self).to_target()
    }
}

impl ToTarget for Prefix {
    fn to_target(&self) -> Result<Target, Error> {
        Ok(Target { prefix: *self, written: None })
    }
}

impl ToTarget for Target {
    fn to_target(&self) -> Result<Target, Error> {
        Ok(self.clone())
    }
}

impl<T: ToTarget + ?Sized> ToTarget for &T {
    fn to_target(&self) -> Result<Target, Error> {
        (**self).to_target()
    }
}
