//! The calls of the API (`proto/margay.proto`), each in the module of its noun.

mod audit;
mod cache;
mod chain;
mod drain;
mod fact;
mod flow;
mod health;
mod identity;
mod legs;
mod order;
mod path;
mod places;
mod policy;
mod program;
mod rebalance;
pub(super) mod reconfiguration;
pub(super) mod route;
mod router;
mod service;
mod stack;
mod status;
mod succession;
pub(super) mod trace;
mod warrant;

pub(in crate::agent) use identity::router_address;
pub(crate) use status::phase;

use std::fmt::Display;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::Stream;
use margay_control::api::v1::agent_server::Agent as Calls;
use margay_control::api::v1::*;
use tonic::{Request, Response, Status};

use super::{Agent, check, joining, metrics, reload};
use crate::listener::Protocol;

/// The API of a running agent.
pub struct Api(pub Arc<Agent>);

type Answer<T> = Result<Response<T>, Status>;
type Streamed<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// The caller is at fault.
fn misuse(error: impl Display) -> Status {
    Status::invalid_argument(error.to_string())
}

/// The thing is not there.
fn not_found(error: impl Display) -> Status {
    Status::not_found(error.to_string())
}

/// This host is at fault: its disk, its keys.
fn environment(error: impl Display) -> Status {
    Status::failed_precondition(error.to_string())
}

/// Runs what waits for the disk, without holding up other calls.
fn blocking<R>(act: impl FnOnce() -> R) -> R {
    tokio::task::block_in_place(act)
}

#[tonic::async_trait]
impl Calls for Api {
    type ChainOrderStream = Streamed<ChainOrderReport>;
    type CheckStream = Streamed<CheckStep>;
    type DrainStream = Streamed<DrainReport>;
    type FlowWatchStream = Streamed<FlowEvent>;
    type RebalanceStream = Streamed<RebalanceReport>;

    async fn status(&self, _: Request<StatusRequest>) -> Answer<StatusReply> {
        Ok(Response::new(status::reply(&self.0)))
    }

    async fn check(&self, request: Request<CheckRequest>) -> Answer<Self::CheckStream> {
        let CheckRequest { peer, protocol } = request.into_inner();
        let protocol = service::parse_protocol(&protocol)?.unwrap_or(Protocol::Tcp);
        Ok(Response::new(check::stream(Arc::clone(&self.0), peer, protocol)))
    }

    async fn service_publish(&self, request: Request<ServicePublishRequest>) -> Answer<ServiceInfo> {
        service::publish(&self.0, request).map(Response::new)
    }

    async fn service_withdraw(&self, request: Request<ServiceWithdrawRequest>) -> Answer<ServiceWithdrawReply> {
        service::withdraw(&self.0, request.into_inner()).await.map(Response::new)
    }

    async fn service_set(&self, request: Request<ServiceSetRequest>) -> Answer<ServiceSetReply> {
        service::set(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Answer<Self::DrainStream> {
        drain::drain(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn undrain(&self, request: Request<UndrainRequest>) -> Answer<UndrainReply> {
        drain::undrain(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn service_wait(&self, request: Request<ServiceWaitRequest>) -> Answer<ServiceWaitReply> {
        service::wait(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn rebalance(&self, request: Request<RebalanceRequest>) -> Answer<Self::RebalanceStream> {
        rebalance::rebalance(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn service_list(&self, _: Request<ServiceListRequest>) -> Answer<ServiceListReply> {
        Ok(Response::new(service::list(&self.0)))
    }

    async fn service_show(&self, request: Request<ServiceShowRequest>) -> Answer<ServiceShowReply> {
        service::show(&self.0, &request.into_inner().name).await.map(Response::new)
    }

    async fn service_resolve(&self, request: Request<ServiceResolveRequest>) -> Answer<ServiceResolveReply> {
        service::resolve(&self.0, &request.into_inner().name).await.map(Response::new)
    }

    async fn program_attach(&self, request: Request<ProgramAttachRequest>) -> Answer<ProgramAttachReply> {
        program::attach(&self.0, request).map(Response::new)
    }

    async fn flow_list(&self, request: Request<FlowListRequest>) -> Answer<FlowListReply> {
        flow::list(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn flow_show(&self, request: Request<FlowShowRequest>) -> Answer<FlowInfo> {
        flow::show(&self.0, &request.into_inner().flow).await.map(Response::new)
    }

    async fn flow_watch(&self, request: Request<FlowWatchRequest>) -> Answer<Self::FlowWatchStream> {
        flow::watch(&self.0, &request.into_inner().service).map(Response::new)
    }

    async fn flow_close(&self, request: Request<FlowCloseRequest>) -> Answer<FlowCloseReply> {
        flow::close(&self.0, &request.into_inner().flow).map(Response::new)
    }

    async fn flow_migrate(&self, request: Request<FlowMigrateRequest>) -> Answer<FlowMigrateReply> {
        flow::migrate(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn flow_policy(&self, request: Request<FlowPolicyRequest>) -> Answer<FlowPolicyReply> {
        flow::set_policy(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn path_list(&self, _: Request<PathListRequest>) -> Answer<PathListReply> {
        Ok(Response::new(path::list(&self.0).await))
    }

    async fn path_migrate(&self, request: Request<PathMigrateRequest>) -> Answer<PathMigrateReply> {
        path::migrate(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn route_list(&self, request: Request<RouteListRequest>) -> Answer<RouteListReply> {
        route::list(&self.0, &request.into_inner().name).map(Response::new)
    }

    async fn route_add(&self, request: Request<RouteAddRequest>) -> Answer<RouteAddReply> {
        route::add(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn route_change(&self, request: Request<RouteChangeRequest>) -> Answer<RouteInfo> {
        route::change(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn route_delete(&self, request: Request<RouteDeleteRequest>) -> Answer<RouteDeleteReply> {
        route::delete(&self.0, request.into_inner().id).map(Response::new)
    }

    async fn policy_apply(&self, request: Request<PolicyApplyRequest>) -> Answer<PolicyApplyReply> {
        policy::apply(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn chain_show(&self, _: Request<ChainShowRequest>) -> Answer<ChainShowReply> {
        chain::show(&self.0).await.map(Response::new)
    }

    async fn chain_change(&self, request: Request<ChainChangeRequest>) -> Answer<ChainChangeReply> {
        reconfiguration::change(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn chain_order(&self, request: Request<ChainOrderRequest>) -> Answer<Self::ChainOrderStream> {
        order::order(&self.0, request.into_inner()).await.map(Response::new)
    }

    async fn trace(&self, request: Request<TraceRequest>) -> Answer<TraceReply> {
        trace::reply(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn router_remove(&self, request: Request<RouterRemoveRequest>) -> Answer<RouterRemoveReply> {
        router::remove(&self.0, &request.into_inner().name).await.map(Response::new)
    }

    async fn router_list(&self, request: Request<RouterListRequest>) -> Answer<RouterListReply> {
        router::list(&self.0, &request.into_inner().name).map(Response::new)
    }

    async fn identity(&self, _: Request<IdentityRequest>) -> Answer<IdentityReply> {
        identity::reply(&self.0).map(Response::new)
    }

    async fn authority_create(&self, request: Request<AuthorityCreateRequest>) -> Answer<AuthorityInfo> {
        identity::create_authority(&self.0, &request.into_inner().name).map(Response::new)
    }

    async fn service_key_create(&self, request: Request<ServiceKeyCreateRequest>) -> Answer<ServiceKeyInfo> {
        identity::create_service_key(&self.0, &request.into_inner().name).map(Response::new)
    }

    async fn warrant_request(&self, request: Request<WarrantRequestRequest>) -> Answer<WarrantRequestReply> {
        warrant::request(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn warrant_sign(&self, request: Request<WarrantSignRequest>) -> Answer<WarrantSignReply> {
        warrant::sign(&self.0, request.into_inner()).map(Response::new)
    }

    async fn warrant_accept(&self, request: Request<WarrantAcceptRequest>) -> Answer<WarrantInfo> {
        warrant::accept(&self.0, &request.into_inner().warrant).map(Response::new)
    }

    async fn authority_succeed(&self, request: Request<AuthoritySucceedRequest>) -> Answer<AuthoritySucceedReply> {
        succession::succeed(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn warrant_revoke(&self, request: Request<WarrantRevokeRequest>) -> Answer<WarrantRevokeReply> {
        warrant::revoke(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn token_create(&self, request: Request<TokenCreateRequest>) -> Answer<TokenCreateReply> {
        identity::create_token(&self.0, request.into_inner()).await.map(Response::new)
    }

    async fn token_list(&self, _: Request<TokenListRequest>) -> Answer<TokenListReply> {
        identity::list_tokens(&self.0).map(Response::new)
    }

    async fn token_revoke(&self, request: Request<TokenRevokeRequest>) -> Answer<TokenInfo> {
        identity::revoke_token(&self.0, &request.into_inner().id).map(Response::new)
    }

    async fn member_list(&self, _: Request<MemberListRequest>) -> Answer<MemberListReply> {
        identity::list_members(&self.0).map(Response::new)
    }

    async fn member_grant(&self, request: Request<MemberGrantRequest>) -> Answer<MemberInfo> {
        identity::grant_member(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn member_remove(&self, request: Request<MemberRemoveRequest>) -> Answer<MemberInfo> {
        identity::remove_member(&self.0, &request.into_inner().host_id).map(Response::new)
    }

    async fn audit_list(&self, request: Request<AuditListRequest>) -> Answer<AuditListReply> {
        audit::list(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn module_note(&self, request: Request<ModuleNoteRequest>) -> Answer<ModuleNoteReply> {
        audit::note_module(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn cache(&self, request: Request<CacheRequest>) -> Answer<CacheReply> {
        cache::act(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn stack_set(&self, request: Request<StackSetRequest>) -> Answer<FlowInfo> {
        stack::set(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn stack_release(&self, request: Request<StackReleaseRequest>) -> Answer<FlowInfo> {
        stack::release(&self.0, &request.into_inner()).await.map(Response::new)
    }

    async fn stack_rule_list(&self, _: Request<StackRuleListRequest>) -> Answer<StackRuleListReply> {
        Ok(Response::new(stack::rules(&self.0)))
    }

    async fn fact_set(&self, request: Request<FactSetRequest>) -> Answer<FactInfo> {
        fact::set(&self.0, &request.into_inner()).map(Response::new)
    }

    async fn fact_list(&self, _: Request<FactListRequest>) -> Answer<FactListReply> {
        Ok(Response::new(fact::list(&self.0)))
    }

    async fn fact_clear(&self, request: Request<FactClearRequest>) -> Answer<FactClearReply> {
        fact::clear(&self.0, &request.into_inner().name).map(Response::new)
    }

    async fn association_list(&self, _: Request<AssociationListRequest>) -> Answer<AssociationListReply> {
        Ok(Response::new(status::associations(&self.0).await))
    }

    async fn metrics(&self, _: Request<MetricsRequest>) -> Answer<MetricsReply> {
        Ok(Response::new(MetricsReply { text: metrics::text(&self.0).await }))
    }

    async fn reload(&self, request: Request<ReloadRequest>) -> Answer<ReloadReply> {
        reload::reload(&self.0, &request.into_inner()).await.map(Response::new).map_err(misuse)
    }

    async fn join(&self, request: Request<JoinRequest>) -> Answer<JoinReply> {
        let token = request.into_inner().token.trim().parse().map_err(misuse)?;
        joining::join(&self.0, token).await.map(Response::new).map_err(environment)
    }

    async fn shutdown(&self, _: Request<ShutdownRequest>) -> Answer<ShutdownReply> {
        self.0.process.parting.for_good.notify_one();
        Ok(Response::new(ShutdownReply {}))
    }
}
