package policies

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/controller-runtime/pkg/client"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/controlplane/federation/grants"
	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/objectcache"
	"github.com/isthmus-net/isthmus/controlplane/internal/withdrawal"
)

// Config describes the replicated policies.
type Config struct {
	// Kinds are the Federation's kinds (see Kinds).
	Kinds []federationv1alpha1.PolicyKind
	// Namespace is the namespace of Isthmus in every member.
	Namespace string
	// Grants say whose policies are replicated.
	Grants grants.Rules
	// Guard configures the withdrawal guard for origins. Its field Changed is not used.
	Guard withdrawal.Config[reconcile.Key]
}

// Travels reports whether o is of a replicated kind and users ask to replicate it.
func (c Config) Travels(o *unstructured.Unstructured) bool {
	return federated(o) && slices.ContainsFunc(c.Kinds, func(k federationv1alpha1.PolicyKind) bool {
		return o.GroupVersionKind() == object(k).GroupVersionKind()
	})
}

// New returns a Reconciler that replicates policies. Services of package services call its ServiceChanged.
func New(c Config) *Reconciler {
	p := &Reconciler{config: c, placed: map[string]map[reconcile.Key]bool{}, peers: map[policyIn][]clusterset.ServiceName{}}
	p.removals = newRemovals(c.Guard.Times, func(key reconcile.Key) { p.requeue(key) })
	c.Guard.Changed = func(_ clusterset.ClusterID, keys []reconcile.Key) { p.requeue(keys...) }
	p.guard = withdrawal.New(c.Guard)
	return p
}

var (
	_ reconcile.Runner               = (*Reconciler)(nil)
	_ reconcile.Guarded              = (*Reconciler)(nil)
	_ reconcile.ReachabilityObserver = (*Reconciler)(nil)
)

// Reconciler is a [reconcile.Reconciler]. Make it with New.
type Reconciler struct {
	config   Config
	guard    *withdrawal.Guard[reconcile.Key]
	enqueue  atomic.Pointer[reconcile.Enqueue] // set by Run
	seen     sync.Map                          // policyIn: policies that the guard knows
	endings  reconcile.Endings
	removals *removals

	mu sync.Mutex
	// placed are the federated policies that were ever seen, by namespace. A member that gets a new namespace gets the
	// policies of it.
	placed map[string]map[reconcile.Key]bool
	// peers are the federated Services that each federated policy names as peers, in the members that this process leads.
	peers map[policyIn][]clusterset.ServiceName

	faults    sync.Map // policyIn to a string: why peers are not admitted
	unremoved sync.Map // policyIn to a string: why an origin cannot be removed
}

// Name is part of reconcile.Reconciler.
func (*Reconciler) Name() string { return "policies" }

// ObservesReachability is part of reconcile.ReachabilityObserver: the status of a policy names unreachable members.
func (*Reconciler) ObservesReachability() {}

// Watches is part of reconcile.Reconciler.
func (r *Reconciler) Watches() []reconcile.Watch {
	watches := []reconcile.Watch{
		{Kind: objectcache.Kind{Source: objectcache.Source{Object: partial("Namespace"), Trim: trimNamespace}}, Keys: r.keysOfNamespace},
		{Kind: objectcache.Kind{Source: objectcache.Source{
			Object:   partial("Service"),
			Selector: labels.SelectorFromSet(labels.Set{v1alpha1.LabelManagedBy: federationv1alpha1.ManagedBy}),
			Keep:     isFederatedService, Trim: trimFederatedService,
		}, Pack: packFederatedService}, Keys: r.keysOfService},
		{Kind: objectcache.Kind{Source: objectcache.Source{
			Object: &corev1.ConfigMap{}, Namespace: r.config.Namespace,
			Selector: reports,
		}}, Keys: r.keyOfReport},
	}
	for _, kind := range r.config.Kinds {
		watches = append(watches, reconcile.Watch{
			Kind: objectcache.Kind{Source: objectcache.Source{Object: object(kind), Trim: trimPolicy, Optional: true, SkipIfForbidden: true}},
			Keys: r.keysOfPolicy(kind), Deleted: r.removals.seen(kind), Counted: isCopy,
		})
	}
	if !slices.Contains(r.config.Kinds, corePolicies) {
		watches = append(watches, r.leftPeers())
	}
	return watches
}

// partial returns an object of a core kind of which only the metadata is read.
func partial(kind string) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: kind}}
}

// trimNamespace removes everything from a namespace but its name and deletion.
func trimNamespace(o any) (any, error) {
	if ns, ok := o.(*metav1.PartialObjectMetadata); ok {
		ns.Labels, ns.Annotations = nil, nil
	}
	return o, nil
}

// trimPolicy removes the content of an object that is neither an origin nor a copy.
func trimPolicy(o any) (any, error) {
	u, ok := o.(*unstructured.Unstructured)
	if !ok {
		return o, nil
	}
	_, isCopy := copyOf(u)
	if _, admits := admittedFor(u); !isCopy && !admits && !federated(u) {
		for field := range u.Object {
			if field != "apiVersion" && field != "kind" && field != "metadata" {
				delete(u.Object, field)
			}
		}
	}
	return u, nil
}

func isCopy(o client.Object) bool {
	_, ok := copyOf(o)
	return ok
}

func isFederatedService(o client.Object) bool {
	_, ok := o.GetAnnotations()[federationv1alpha1.MarkFederatedService]
	return ok
}

// packedService is a federated Service, of which policies need only the name. A federation of 20 members with 500 Services each
// has 10,000.
type packedService struct {
	objectcache.Identity

	namespace unique.Handle[string]
}

// trimFederatedService leaves what a packedService holds.
func trimFederatedService(obj any) (any, error) {
	o, ok := obj.(*metav1.PartialObjectMetadata)
	if !ok {
		return obj, nil
	}
	return federatedMetadata(metav1.ObjectMeta{Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion}), nil
}

// federatedMetadata returns the object of a federated Service.
func federatedMetadata(meta metav1.ObjectMeta) *metav1.PartialObjectMetadata {
	meta.Annotations = map[string]string{federationv1alpha1.MarkFederatedService: ""}
	o := partial("Service")
	o.ObjectMeta = meta
	return o
}

// packFederatedService is the Pack of the Watch of federated Services.
func packFederatedService(o client.Object) objectcache.Packed {
	identity, ok := objectcache.Identify(o)
	if !ok {
		return nil
	}
	return &packedService{identity, unique.Make(o.GetNamespace())}
}

// Unpack is part of objectcache.Packed.
func (s *packedService) Unpack() client.Object { return federatedMetadata(s.Meta(s.namespace.Value())) }

// requeue has keys reconciled again. Before Run, every key is about to be reconciled anyway.
func (r *Reconciler) requeue(keys ...reconcile.Key) {
	enqueue := r.enqueue.Load()
	if enqueue == nil {
		return
	}
	for _, key := range keys {
		(*enqueue)(key)
	}
}

// keysOfPolicy returns the key of a policy, and records the namespaces of federated ones. What leaders wrote for its peers has its key.
func (r *Reconciler) keysOfPolicy(kind federationv1alpha1.PolicyKind) func(reconcile.Member, client.Object) []reconcile.Key {
	return func(_ reconcile.Member, o client.Object) []reconcile.Key {
		key := keyOf(kind, o.GetNamespace(), o.GetName())
		if of, ok := admittedFor(o); ok {
			key.Name = of
			return []reconcile.Key{key}
		}
		if key.Namespace != "" && federated(o) {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.placed[key.Namespace] == nil {
				r.placed[key.Namespace] = map[reconcile.Key]bool{}
			}
			r.placed[key.Namespace][key] = true
		}
		return []reconcile.Key{key}
	}
}

// keysOfNamespace returns the policies of a namespace that comes or goes.
func (r *Reconciler) keysOfNamespace(from reconcile.Member, ns client.Object) []reconcile.Key {
	r.endings.Note(from.ID(), ns)
	r.mu.Lock()
	defer r.mu.Unlock()
	var keys []reconcile.Key
	for key := range r.placed[ns.GetName()] {
		keys = append(keys, key)
	}
	return keys
}

// keysOfService returns the policies of a member that name the federated Service o.
func (r *Reconciler) keysOfService(from reconcile.Member, o client.Object) []reconcile.Key {
	var keys []reconcile.Key
	for _, kind := range r.config.Kinds {
		list, err := r.list(context.Background(), from, kind)
		if err != nil {
			continue // its policies are reconciled when the kind has been read
		}
		for i := range list.Items {
			policy := &list.Items[i]
			named := false
			if federated(policy) {
				localPeers(policy, func(namespace, name string) bool {
					named = named || namespace == o.GetNamespace() && name == o.GetName()
					return true
				})
			}
			if named {
				keys = append(keys, keyOf(kind, policy.GetNamespace(), policy.GetName()))
			}
		}
	}
	return keys
}

func (*Reconciler) list(ctx context.Context, from client.Reader, kind federationv1alpha1.PolicyKind) (*unstructured.UnstructuredList, error) {
	list := &unstructured.UnstructuredList{}
	gvk := object(kind).GroupVersionKind()
	gvk.Kind += "List"
	list.SetGroupVersionKind(gvk)
	return list, from.List(ctx, list)
}

// Reconcile is part of reconcile.Reconciler.
func (r *Reconciler) Reconcile(ctx context.Context, key reconcile.Key, into reconcile.Writer, all []reconcile.Member) error {
	if key.Kind == networkPolicy && !slices.Contains(r.config.Kinds, corePolicies) {
		return dropPeers(ctx, key, into)
	}
	r.removals.leads(into) // before it reads: a deletion that it sees later counts
	seen := make([]observed, len(all))
	here := -1
	for i, m := range all {
		var err error
		if seen[i], err = r.observe(ctx, key, m); err != nil {
			return fmt.Errorf("read %s of member %s: %w", describe(key), m.ID(), err)
		}
		if m.ID() == into.ID() {
			here = i
		}
	}
	if here < 0 {
		return fmt.Errorf("member %s is not one of the members", into.ID())
	}
	if !seen[here].read {
		return nil
	}
	return errors.Join(r.replicate(ctx, key, into, &seen[here], seen), r.admitServices(ctx, key, into, &seen[here]))
}

// replicate brings the policy in one member in line with all members.
func (r *Reconciler) replicate(ctx context.Context, key reconcile.Key, into reconcile.Writer, here *observed, all []observed) error {
	r.forget(key, all)
	r.note(key, all)
	if here.removal != nil && (here.ended(all) || r.config.Grants.Policy(into.ID(), key.Namespace, key.Name) != nil) {
		if err := into.Delete(ctx, here.removal.stored); err != nil {
			return err
		}
	}
	if o := here.object; o != nil {
		if federated(o) {
			if done, err := r.removeOrigin(ctx, key, into, here, all); done || err != nil {
				return err
			}
			return r.report(ctx, into, here, all)
		}
		if _, isCopy := copyOf(o); !isCopy && o.GetAnnotations()[AnnotationStatus] != "" {
			return into.Annotate(ctx, o, map[string]string{AnnotationStatus: ""})
		}
	}
	return r.enforce(ctx, key, into, here, all)
}

// forget removes a policy that no cluster asks to replicate from the policies of its namespace.
func (r *Reconciler) forget(key reconcile.Key, seen []observed) {
	if key.Namespace == "" || origin(seen) != nil || slices.ContainsFunc(seen, func(h observed) bool { return !h.read }) {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.placed[key.Namespace], key)
	if len(r.placed[key.Namespace]) == 0 {
		delete(r.placed, key.Namespace)
	}
}

// observe reads the state of a policy in one member.
func (r *Reconciler) observe(ctx context.Context, key reconcile.Key, m reconcile.Member) (observed, error) {
	h := observed{member: m.ID(), read: m.Synced(), reachable: m.Reachable(), served: true, namespace: true}
	if !h.read {
		return h, nil
	}
	found := func(name client.ObjectKey, o client.Object) (bool, error) {
		err := m.Get(ctx, name, o)
		return err == nil, client.IgnoreNotFound(err)
	}
	o := empty(key)
	there, err := found(client.ObjectKey{Namespace: key.Namespace, Name: key.Name}, o)
	switch {
	case errors.Is(err, objectcache.ErrKindMissing):
		h.served = false
	case errors.Is(err, objectcache.ErrNotSynced):
		h.read = false
		return h, nil
	case err != nil:
		return h, err
	case there:
		r.place(&h, o)
	}
	if key.Namespace != "" {
		ns := partial("Namespace")
		if h.namespace, err = found(client.ObjectKey{Name: key.Namespace}, ns); err != nil {
			return h, err
		}
		h.namespace = h.namespace && ns.DeletionTimestamp == nil
	}
	told := &corev1.ConfigMap{}
	if there, err = found(client.ObjectKey{Namespace: r.config.Namespace, Name: refusalName(key)}, told); err != nil {
		return h, err
	}
	if there {
		h.refusal = readRefusal(told)
	}
	told = &corev1.ConfigMap{}
	if there, err = found(client.ObjectKey{Namespace: r.config.Namespace, Name: removalName(key)}, told); err != nil {
		return h, err
	}
	if there {
		h.removal = readRemoval(told)
	}
	return h, nil
}

// place makes o the object of a member.
func (r *Reconciler) place(h *observed, o *unstructured.Unstructured) {
	h.object, h.denial = o, nil
	if federated(o) {
		h.denial = r.config.Grants.Policy(h.member, o.GetNamespace(), o.GetName())
	}
}

// enforce brings the copy in a member in line with its origin.
func (r *Reconciler) enforce(ctx context.Context, key reconcile.Key, into reconcile.Writer, here *observed, all []observed) error {
	s := decide(here, all)
	if s.verb == remove && r.keeps(key, here.object, all) {
		return nil // the guard enqueues the key again
	}
	if done, err := r.removeCopy(ctx, key, into, here, all, s); done || err != nil {
		return err
	}
	var err error
	switch s.verb {
	case leave:
	case remove:
		r.removals.own(into.ID(), key, here.object.GetUID())
		return errors.Join(into.Delete(ctx, here.object), r.allowed(ctx, into, here))
	case create:
		o := s.want.DeepCopy()
		if err = into.Create(ctx, o); err == nil {
			err = noteStored(ctx, into, o, s.want)
		}
	case replace:
		o := over(here.object, s.want, s.edited, time.Now())
		if err = into.Replace(ctx, o); err == nil {
			err = noteStored(ctx, into, o, s.want)
		}
		if err == nil && s.edited {
			into.Event(o, corev1.EventTypeWarning, "EditUndone",
				fmt.Sprintf("this is a copy of a policy in cluster %s; change it there", origin(all).member))
		}
	}
	switch {
	case refuses(err):
		return errors.Join(fmt.Errorf("%s %s: %w", s.verb, describe(key), err), r.refused(ctx, into, here, key, s.want, err))
	case terminating(err), ceases(err):
		return nil // nothing has to be written
	case err != nil:
		return fmt.Errorf("%s %s: %w", s.verb, describe(key), err)
	}
	return r.allowed(ctx, into, here)
}

// noteStored records the digest of the stored content if the API server changed want.
func noteStored(ctx context.Context, into reconcile.Writer, stored, want *unstructured.Unstructured) error {
	is := body(stored)
	if d := digest(is); d != digest(body(want)) {
		return into.Annotate(ctx, stored, map[string]string{annotationStored: d})
	}
	return nil
}

// report writes the status of the policy in here, if it changed.
func (r *Reconciler) report(ctx context.Context, into reconcile.Writer, here *observed, all []observed) error {
	peers := localPeers(here.object, func(namespace, name string) bool {
		return into.Get(ctx, client.ObjectKey{Namespace: namespace, Name: name}, partial("Service")) == nil
	})
	before, now := ReadStatus(here.object), statusOf(here, all, peers)
	if now.text() == here.object.GetAnnotations()[AnnotationStatus] {
		return nil
	}
	if err := into.Annotate(ctx, here.object, map[string]string{AnnotationStatus: now.text()}); err != nil {
		return err
	}
	if len(now.Peers) > 0 && !slices.Equal(before.Peers, now.Peers) {
		into.Event(here.object, corev1.EventTypeWarning, "PeersDifferByCluster",
			"only federated Services are the same in all clusters: "+strings.Join(now.Peers, "; "))
	}
	for member, is := range now.Members {
		if was := before.Members[member]; is != was && (is.State == Refused || is.State == Taken) {
			into.Event(here.object, corev1.EventTypeWarning, "NotReplicated", fmt.Sprintf("member %s: %s: %s", member, is.State, is.Message))
		}
	}
	if now.Denied != "" && now.Denied != before.Denied {
		into.Event(here.object, corev1.EventTypeWarning, "NotReplicated", now.Denied)
	}
	if now.Origin != "" && now.Origin != before.Origin {
		into.Event(here.object, corev1.EventTypeWarning, "NotReplicated",
			fmt.Sprintf("cluster %s has an older federated policy of this name, which takes precedence; rename one of them", now.Origin))
	}
	return nil
}

// describe names a policy in errors.
func describe(key reconcile.Key) string {
	kind, _, _ := strings.Cut(key.Kind, ".")
	return fmt.Sprintf("%s %s", kind, client.ObjectKey{Namespace: key.Namespace, Name: key.Name})
}

// refuses reports whether err states that an API server, or one of its webhooks, refuses the object. A refusal by the fence
// concerns the leader, not the object.
func refuses(err error) bool {
	if errors.Is(err, reconcile.ErrNotLeader) || terminating(err) || ceases(err) || err != nil && strings.Contains(err.Error(), admission.FenceName) {
		return false
	}
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) || apierrors.IsInternalError(err) ||
		apierrors.IsRequestEntityTooLargeError(err)
}

// ceases reports whether err states that the definition of the kind is being deleted. API servers say that it is forbidden, and those of
// some releases that the method is not supported.
func ceases(err error) bool {
	return apierrors.IsMethodNotSupported(err) || apierrors.IsForbidden(err) && strings.Contains(err.Error(), "custom resource definition is terminating")
}

// terminating reports whether err states that the namespace is being deleted.
func terminating(err error) bool {
	return apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause)
}
