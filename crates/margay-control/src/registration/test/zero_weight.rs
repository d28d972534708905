//! Why an instance takes nothing new: who asks the router, or watches the name, hears the host's own words.

use super::*;
use crate::registration::ZeroWeight;

fn without_weight(why: Option<ZeroWeight>) -> Registration {
    Registration { zero_weight: why, ..registration("web.shop", 0) }
}

#[tokio::test]
async fn lists_say_why_an_instance_has_no_weight_and_forget_it_when_it_has_some() {
    let (router, at, _host, home) = shop().await;
    let (_other, other) = second(&router, &at).await;
    let web: Prefix = "web.shop".parse().expect("literal");
    other.watch(web, Watcher::Absences);
    let sick = ZeroWeight { sick: Some("answers 503".to_owned()), ..ZeroWeight::default() };
    let both = ZeroWeight { is_drained: true, ..sick.clone() };
    // An earlier version's host says nothing.
    for why in [None, Some(sick), Some(both)] {
        home.register(without_weight(why.clone()));
        let expected = why.map(Box::new);
        let is_told = |found: &[Instance]| found.first().is_some_and(|found| found.zero_weight == expected);
        until("the router's list", || at.instances().len() == 1 && is_told(&at.instances())).await;
        until("who watches", || other.watched(&web).is_some_and(|found| is_told(&found))).await;
        let resolved = other.resolve(web.id).await.expect("answered");
        assert!(is_told(&resolved) && resolved[0].weight == 0, "{resolved:?}");
    }
    home.register(registration("web.shop", 100));
    until("the weight", || at.instances()[0].weight == 100).await;
    assert_eq!(at.instances()[0].zero_weight, None);
    at.stop().await;
}
