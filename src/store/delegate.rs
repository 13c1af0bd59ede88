//! Forwarding for stores around another store.

/// Forwards every method of [`Store`](crate::store::Store) that a decorator does not implement to
/// the inner store.
///
/// The default methods of the trait are for stores that lack a capability. A decorator with these
/// defaults would hide what the inner store can do, without an error. The decorator names the
/// methods that it implements itself, and the macro adds the others.
///
/// ```
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use tollgate::store::{StoreReply, LeaseRequest, Lease, MemoryStore, Store};
///
/// /// Counts the calls that book.
/// struct Counted {
///     store: MemoryStore,
///     calls: AtomicU64,
/// }
///
/// impl Store for Counted {
///     tollgate::delegate_store!(self => self.store; implements lease);
///
///     fn lease(&self, request: LeaseRequest<'_>) -> StoreReply<Lease> {
///         self.calls.fetch_add(1, Ordering::Relaxed);
///         self.store.lease(request)
///     }
/// }
/// ```
#[cfg_attr(feature = "unstable-store", macro_export)]
#[cfg_attr(docsrs, doc(cfg(feature = "unstable-store")))]
macro_rules! delegate_store {
    ($this:ident => $inner:expr; implements $($own:ident),+ $(,)?) => {
        $crate::delegate_store!(@unless lease [$($own)+] {
            fn lease(&$this, request: $crate::store::LeaseRequest<'_>) -> $crate::store::StoreReply<$crate::store::Lease> {
                $crate::store::Store::lease(&$inner, request)
            }
        });
        $crate::delegate_store!(@unless give_back [$($own)+] {
            fn give_back(
                &$this,
                key: $crate::Key,
                spec: &::std::sync::Arc<$crate::store::LimitSpec>,
                unused: &[$crate::store::UnusedPermits],
            ) {
                $crate::store::Store::give_back(&$inner, key, spec, unused);
            }
        });
        $crate::delegate_store!(@unless claim [$($own)+] {
            fn claim(
                &$this,
                claim: $crate::store::Claim,
                listener: &::std::sync::Arc<dyn $crate::store::StoreListener>,
            ) {
                $crate::store::Store::claim(&$inner, claim, listener);
            }
        });
        $crate::delegate_store!(@unless change [$($own)+] {
            fn change(
                &$this,
                key: $crate::Key,
                spec: &::std::sync::Arc<$crate::store::LimitSpec>,
                change: $crate::store::Change,
            ) -> $crate::store::StoreReply<$crate::store::InForce> {
                $crate::store::Store::change(&$inner, key, spec, change)
            }
        });
        $crate::delegate_store!(@unless listen [$($own)+] {
            fn listen(&$this, listener: ::std::sync::Weak<dyn $crate::store::StoreListener>) {
                $crate::store::Store::listen(&$inner, listener);
            }
        });
        $crate::delegate_store!(@unless compare_and_set [$($own)+] {
            fn compare_and_set(
                &$this,
                change: $crate::store::RegisterRequest,
            ) -> $crate::store::StoreReply<$crate::store::Register> {
                $crate::store::Store::compare_and_set(&$inner, change)
            }
        });
        $crate::delegate_store!(@unless address [$($own)+] {
            fn address(&$this) -> u64 {
                $crate::store::Store::address(&$inner)
            }
        });
        $crate::delegate_store!(@unless peek [$($own)+] {
            fn peek(
                &$this,
                request: $crate::store::PeekRequest,
            ) -> $crate::store::StoreReply<$crate::store::Usage> {
                $crate::store::Store::peek(&$inner, request)
            }
        });
        $crate::delegate_store!(@unless label [$($own)+] {
            fn label(&$this, key: $crate::Key) -> $crate::store::Label {
                $crate::store::Store::label(&$inner, key)
            }
        });
        $crate::delegate_store!(@unless background [$($own)+] {
            fn background(&$this) -> ::std::option::Option<&dyn $crate::store::Background> {
                $crate::store::Store::background(&$inner)
            }
        });
        $crate::delegate_store!(@unless flush [$($own)+] {
            fn flush(&$this) -> $crate::store::StoreReply<()> {
                $crate::store::Store::flush(&$inner)
            }
        });
    };

    // Adds a method unless the list names it.
    (@unless lease [lease $($more:ident)*] $method:tt) => {};
    (@unless give_back [give_back $($more:ident)*] $method:tt) => {};
    (@unless claim [claim $($more:ident)*] $method:tt) => {};
    (@unless change [change $($more:ident)*] $method:tt) => {};
    (@unless listen [listen $($more:ident)*] $method:tt) => {};
    (@unless compare_and_set [compare_and_set $($more:ident)*] $method:tt) => {};
    (@unless address [address $($more:ident)*] $method:tt) => {};
    (@unless peek [peek $($more:ident)*] $method:tt) => {};
    (@unless label [label $($more:ident)*] $method:tt) => {};
    (@unless background [background $($more:ident)*] $method:tt) => {};
    (@unless flush [flush $($more:ident)*] $method:tt) => {};
    (@unless $name:ident [$other:ident $($more:ident)*] $method:tt) => {
        $crate::delegate_store!(@unless $name [$($more)*] $method);
    };
    (@unless $name:ident [] { $($method:tt)* }) => { $($method)* };
}

#[cfg(not(feature = "unstable-store"))]
pub(crate) use delegate_store;
