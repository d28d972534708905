//! The API over TLS, for operators on other hosts: both ends show a certificate (DESIGN §8).
//!
//! Whoever shows one that an authority of operators has signed may do what root may do here, but for what needs a
//! program on this host or ends the agent. Each call is told to the caller of [`serve`], with the fingerprint of the
//! certificate.

use std::error::Error;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use margay_core::key::to_hex;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::{TlsAcceptor, TlsConnector};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};
use tonic::server::NamedService;
use tonic::transport::server::{TcpConnectInfo, TlsConnectInfo};
use tonic::transport::{Channel, Server};

use super::admission::admitted;
use super::client_over;
use super::v1::agent_client::AgentClient;
use super::v1::agent_server::{Agent, AgentServer};

/// What an operator elsewhere may not call: it would act on programs here, or leave nobody to answer.
const LOCAL_ONLY: [&str; 2] = ["ProgramAttach", "Shutdown"];

/// What is spoken inside of TLS.
const ALPN: &[u8] = b"h2";

/// An agent that does not answer for so long is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The files of one end, all PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// This end's certificate, and those between it and its authority.
    pub certificate: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authorities that sign the other end's.
    pub authorities: PathBuf,
}

/// Why there is no TLS. Each names the file or the place.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// A file.
    #[error("{path}: {error}; it has to be PEM, and readable by who runs this", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The files are no certificates, or do not fit each other.
    #[error(
        "{certificate}, {key} and {authorities} are no certificate, its key, and certificates of authorities: {why}",
        certificate = files.certificate.display(), key = files.key.display(), authorities = files.authorities.display()
    )]
    Unfit {
        /// Which.
        files: TlsFiles,
        /// What is wrong.
        why: String,
    },
    /// The address cannot be had.
    #[error("the API cannot be heard at TCP {address}: {error}; correct [api] listen in the configuration")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What the system said.
        error: io::Error,
    },
    /// Nobody is there.
    #[error("{address}: {error}; is that the agent's [api] listen, and may this host reach it?")]
    Unreachable {
        /// Where.
        address: String,
        /// What the system said.
        error: io::Error,
    },
    /// The two ends do not trust each other.
    #[error(
        "{address}: no TLS: {why}; the authority (--tls-ca) must be that of the agent's certificate, the agent's \
         certificate be for this \
             name or address, and this operator's certificate be of an authority in the agent's [api] operators"
    )]
    Distrust {
        /// Where.
        address: String,
        /// What is wrong.
        why: String,
    },
    /// gRPC failed.
    #[error("the API ended: {0}")]
    Transport(#[from] tonic::transport::Error),
}

fn read(path: &Path) -> Result<Vec<u8>, RemoteError> {
    std::fs::read(path).map_err(|error| RemoteError::File { path: path.to_owned(), error })
}

impl TlsFiles {
    fn unfit(&self, error: &dyn Error) -> RemoteError {
        RemoteError::Unfit { files: self.clone(), why: error.to_string() }
    }

    fn certificates(&self, path: &Path) -> Result<Vec<CertificateDer<'static>>, RemoteError> {
        CertificateDer::pem_slice_iter(&read(path)?).collect::<Result<_, _>>().map_err(|error| self.unfit(&error))
    }

    /// What this end shows.
    fn identity(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), RemoteError> {
        let key = PrivateKeyDer::from_pem_slice(&read(&self.key)?).map_err(|error| self.unfit(&error))?;
        Ok((self.certificates(&self.certificate)?, key))
    }

    /// Whom it believes.
    fn believed(&self) -> Result<RootCertStore, RemoteError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates(&self.authorities)? {
            roots.add(certificate).map_err(|error| self.unfit(&error))?;
        }
        Ok(roots)
    }

    fn server(&self) -> Result<ServerConfig, RemoteError> {
        let ((shown, key), provider) = (self.identity()?, Arc::new(ring::default_provider()));
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(self.believed()?), Arc::clone(&provider)).build();
        let verifier = verifier.map_err(|error| self.unfit(&error))?;
        let versions = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| self.unfit(&error))?;
        let config = versions.with_client_cert_verifier(verifier).with_single_cert(shown, key);
        let mut config = config.map_err(|error| self.unfit(&error))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(config)
    }

    fn client(&self) -> Result<ClientConfig, RemoteError> {
        let ((shown, key), roots) = (self.identity()?, self.believed()?);
        let versions = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| self.unfit(&error))?;
        let config = versions.with_root_certificates(roots).with_client_auth_cert(shown, key);
        let mut config = config.map_err(|error| self.unfit(&error))?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        Ok(config)
    }
}

/// A place where operators are heard.
pub struct Door {
    listener: TcpListener,
    tls: TlsAcceptor,
}

/// Listens at `address`.
///
/// # Errors
///
/// The files make no sense, or the address cannot be had.
pub async fn open(address: SocketAddr, files: &TlsFiles) -> Result<Door, RemoteError> {
    let tls = TlsAcceptor::from(Arc::new(files.server()?));
    let listener = TcpListener::bind(address).await.map_err(|error| RemoteError::Listen { address, error })?;
    Ok(Door { listener, tls })
}

/// Who calls what: the fingerprint of a certificate, where from, the name of the call.
pub type Heard = Arc<dyn Fn(&str, Option<SocketAddr>, &str) + Send + Sync>;

/// Answers operators until `until` is done; `heard` is told of each call before it is carried out.
///
/// # Errors
///
/// The transport fails.
pub async fn serve(
    door: Door,
    agent: impl Agent,
    heard: Heard,
    until: impl Future<Output = ()>,
) -> Result<(), RemoteError> {
    let Door { listener, tls } = door;
    let service = Guarded { inner: AgentServer::new(agent), heard };
    let incoming = admitted(listener, move |stream| tls.accept(stream));
    Ok(Server::builder().add_service(service).serve_with_incoming_shutdown(incoming, until).await?)
}

/// The API, with somebody at the door.
#[derive(Clone)]
struct Guarded<S> {
    inner: S,
    heard: Heard,
}

impl<S: NamedService> NamedService for Guarded<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Guarded<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let call = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
        let caller = request.extensions().get::<TlsConnectInfo<TcpConnectInfo>>();
        let fingerprint = caller.and_then(|caller| {
            let shown = caller.peer_certs()?;
            shown.first().map(|first| to_hex(&blake3::hash(first).as_bytes()[..8]))
        });
        let Some(fingerprint) = fingerprint else {
            // TLS lets nobody in without one.
            let refusal = Status::unauthenticated("operators show a certificate");
            return Box::pin(async move { Ok(refusal.into_http()) });
        };
        if LOCAL_ONLY.contains(&&call[..]) {
            let refusal = Status::permission_denied("that is done on the host itself");
            return Box::pin(async move { Ok(refusal.into_http()) });
        }
        (self.heard)(&fingerprint, caller.and_then(|caller| caller.get_ref().remote_addr()), &call);
        Box::pin(self.inner.call(request))
    }
}

/// A client of the agent at `address`, a name or an IP address with a port.
///
/// # Errors
///
/// Nobody is there, or the two do not trust each other.
pub async fn connect(address: &str, files: &TlsFiles) -> Result<AgentClient<Channel>, RemoteError> {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    let tls = TlsConnector::from(Arc::new(files.client()?));
    let unreachable = |error| RemoteError::Unreachable { address: address.to_owned(), error };
    let name = ServerName::try_from(host.to_owned());
    let name = name.map_err(|error| unreachable(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
    let reached = timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await;
    let reached = reached.unwrap_or_else(|late| Err(late.into())).map_err(unreachable)?;
    let agreed = timeout(CONNECT_TIMEOUT, agree(&tls, name, reached)).await.unwrap_or_else(|late| Err(late.into()));
    let agreed =
        agreed.map_err(|error| RemoteError::Distrust { address: address.to_owned(), why: error.to_string() })?;
    Ok(client_over(agreed).await?)
}

/// TLS that both ends have agreed to. With TLS 1.3 a client hears last, and only if it has not begun to speak, that its
/// certificate is not taken: what it has said by then would be answered by a reset, which overtakes the reason. But
/// HTTP/2 lets a server speak at once.
async fn agree(
    tls: &TlsConnector,
    name: ServerName<'static>,
    stream: TcpStream,
) -> io::Result<BufReader<TlsStream<TcpStream>>> {
    let mut stream = BufReader::new(tls.connect(name, stream).await?);
    if stream.fill_buf().await?.is_empty() {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the agent has ended the connection"));
    }
    Ok(stream)
}
