package membership

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/internal/kube/admin"
)

// asks sends one request to the broker with the credentials of a member.
func asks(ctx context.Context, c client.Client, namespace string) error {
	return c.List(ctx, &v1alpha1.MemberList{}, client.InNamespace(namespace))
}

// pods plays the kubelet and the controller of Deployments for a member's controller: whenever the Deployment
// changes, a new pod starts with what stands in the Secret now, and asks the broker on and on. It ends with
// ctx and returns the errors that any pod has met while it was the newest.
type pods struct {
	member    client.Client
	namespace string // in the member
	broker    string // the broker's namespace

	mu     sync.Mutex
	failed []error
	asked  int
}

func (p *pods) run(ctx context.Context, t *testing.T) error {
	t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	var newest client.Client
	var generation int64
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		d := &appsv1.Deployment{}
		if err := p.member.Get(ctx, client.ObjectKey{Namespace: p.namespace, Name: controllerDeployment}, d); err != nil {
			continue // at the end
		}
		if d.Generation != generation {
			newest, generation = newClient(t, credentials(t, p.member, p.namespace)), d.Generation
			d.Status = appsv1.DeploymentStatus{
				ObservedGeneration: generation,
				Replicas:           *d.Spec.Replicas, UpdatedReplicas: *d.Spec.Replicas, ReadyReplicas: *d.Spec.Replicas, AvailableReplicas: *d.Spec.Replicas,
			}
			if err := p.member.Status().Update(ctx, d); err != nil {
				return err
			}
		}
		err := asks(ctx, newest, p.broker)
		p.mu.Lock()
		p.asked++
		if err != nil && ctx.Err() == nil {
			p.failed = append(p.failed, err)
		}
		p.mu.Unlock()
	}
}

// A member gets new credentials, has valid ones at any time, and the old ones are revoked.
func TestRotate(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "rotate"})
	member := cluster(t, &memberServer)
	r := request(info, "a", 1)
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Fatal(err)
	}
	put(t, member, controller(r.Namespace, 1))

	cfg := credentials(t, member, r.Namespace)
	cfg.BearerTokenFile = "" // somebody who has the token alone
	thief := newClient(t, cfg)
	if err := asks(t.Context(), thief, "rotate"); err != nil {
		t.Fatal(err)
	}

	ctx, cancel := context.WithCancel(t.Context())
	running := &pods{member: member, namespace: r.Namespace, broker: "rotate"}
	var group errgroup.Group
	group.Go(func() error { return running.run(ctx, t) })
	rotated, err := Rotate(t.Context(), asAdmin, member, r.Namespace, "a", time.Minute)
	if err != nil || rotated.Revoked != 1 || !rotated.Restarted {
		t.Errorf("rotated: %+v, %v", rotated, err)
	}

	err = admin.Await(t.Context(), "the old token is still good", func() (bool, error) {
		err := asks(t.Context(), thief, "rotate")
		if err != nil && !apierrors.IsUnauthorized(err) {
			return false, err
		}
		return err != nil, nil
	})
	if err != nil {
		t.Error(err)
	}
	cancel()
	if err := group.Wait(); err != nil {
		t.Error(err)
	}
	if running.asked == 0 || len(running.failed) > 0 {
		t.Errorf("of %d requests of the controller %d failed: %v", running.asked, len(running.failed), errors.Join(running.failed...))
	}

	// A later token is bound to the same Secret.
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Fatal(err)
	}
	if n := tokens(t, asAdmin, "rotate"); n != 1 {
		t.Errorf("tokens are bound to %d Secrets", n)
	}
	if rotated, err = Rotate(t.Context(), asAdmin, member, r.Namespace, "", time.Second); err == nil || rotated.Revoked != 0 {
		t.Errorf("without a controller it is not ready, and rotated: %+v, %v", rotated, err)
	}
}

// tokens counts the Secrets to which tokens are bound.
func tokens(t *testing.T, asAdmin client.Client, namespace string) int {
	t.Helper()
	list := &corev1.SecretList{}
	if err := asAdmin.List(t.Context(), list, client.InNamespace(namespace)); err != nil {
		t.Fatal(err)
	}
	return len(list.Items)
}

// The old token stays valid until the controller is ready with the new one. The next run leaves one token.
func TestInterruptedRotate(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "halfway"})
	member := cluster(t, &memberServer)
	r := request(info, "a", 1)
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Fatal(err)
	}
	old := newClient(t, credentials(t, member, r.Namespace))
	d := controller(r.Namespace, 2)
	put(t, member, d) // nobody runs it, so it never gets ready
	_, err := Rotate(t.Context(), asAdmin, member, r.Namespace, "", time.Second)
	if err == nil || !strings.Contains(err.Error(), "Deployment halfway-a/net-controller is not ready with the new credentials after 1s") ||
		!strings.Contains(err.Error(), "the old credentials stay valid until isthmusctl rotate succeeds") {
		t.Errorf("rotated: %v", err)
	}
	if err := asks(t.Context(), old, "halfway"); err != nil {
		t.Errorf("the old token: %v", err)
	}
	if err := asks(t.Context(), newClient(t, credentials(t, member, r.Namespace)), "halfway"); err != nil {
		t.Errorf("the new token: %v", err)
	}
	if err := member.Delete(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	rotated, err := Rotate(t.Context(), asAdmin, member, r.Namespace, "", time.Second)
	if err != nil || rotated.Revoked != 2 || rotated.Restarted {
		t.Errorf("rotated: %+v, %v", rotated, err)
	}
	if n := tokens(t, asAdmin, "halfway"); n != 1 {
		t.Errorf("there are %d tokens", n)
	}
	if _, err := Rotate(t.Context(), asAdmin, member, r.Namespace, "b", time.Second); err == nil || !strings.Contains(err.Error(), "this cluster is member a, not b") {
		t.Errorf("rotated b: %v", err)
	}
}

// Revoked credentials are invalid at once, published objects stay, and operations on other members do not restore the
// rights.
func TestRevoke(t *testing.T) {
	info, asAdmin := deploy(t, Broker{Namespace: "revoke"})
	member := cluster(t, &memberServer)
	r := request(info, "a", 1)
	if _, err := Join(t.Context(), asAdmin, member, r); err != nil {
		t.Fatal(err)
	}
	asMember := newClient(t, credentials(t, member, r.Namespace))
	if err := asks(t.Context(), asMember, "revoke"); err != nil {
		t.Fatal(err)
	}
	if err := Revoke(t.Context(), asAdmin, "revoke", "b"); !errors.Is(err, ErrNoMember) || !strings.Contains(err.Error(), "no such member: b; the members are a") {
		t.Errorf("revoked b: %v", err)
	}
	if err := Revoke(t.Context(), asAdmin, "default", "a"); !errors.Is(err, ErrNoBroker) {
		t.Errorf("revoked elsewhere: %v", err)
	}
	for range 2 {
		if err := Revoke(t.Context(), asAdmin, "revoke", "a"); err != nil {
			t.Fatal(err)
		}
	}
	for what, is := range map[string]func(error) bool{"it has rights": func(err error) bool { return err != nil }, "its token is good": apierrors.IsUnauthorized} {
		err := admin.Await(t.Context(), what, func() (bool, error) { return is(asks(t.Context(), asMember, "revoke")), nil })
		if err != nil {
			t.Error(err)
		}
	}
	if _, err := DeployBroker(t.Context(), asAdmin, Broker{Namespace: "revoke", TokenTTL: time.Hour}); err != nil {
		t.Fatal(err)
	}
	list, err := List(t.Context(), asAdmin, "revoke")
	if err != nil || len(list) != 1 || !list[0].Revoked {
		t.Errorf("members: %+v, %v", list, err)
	}
	// Rotate restores it.
	if _, err := Rotate(t.Context(), asAdmin, member, r.Namespace, "", time.Second); err != nil {
		t.Fatal(err)
	}
	if err := asks(t.Context(), newClient(t, credentials(t, member, r.Namespace)), "revoke"); err != nil {
		t.Errorf("the new token: %v", err)
	}
	if list, err := List(t.Context(), asAdmin, "revoke"); err != nil || list[0].Revoked {
		t.Errorf("members: %+v, %v", list, err)
	}
}

// A token that an older isthmusctl left in the kubeconfig is replaced by a token file.
func TestTokenFileReplacesToken(t *testing.T) {
	const old = `{apiVersion: v1, kind: Config, current-context: broker, contexts: [{name: broker, context: {cluster: broker, user: broker, namespace: b}}],
clusters: [{name: broker, cluster: {server: "https://192.0.2.1"}}], users: [{name: broker, user: {token: old}}]}`
	text, err := withTokenFile([]byte(old))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(dir+"/kubeconfig", text, 0o600), os.WriteFile(dir+"/token", []byte("new"), 0o600)); err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.BuildConfigFromFlags("", dir+"/kubeconfig")
	if err != nil || cfg.BearerToken != "new" || cfg.BearerTokenFile != dir+"/token" || cfg.Host != "https://192.0.2.1" {
		t.Errorf("it is read as %+v, %v", cfg, err)
	}
	for name, broken := range map[string]string{"nothing": "", "no context": `{apiVersion: v1, kind: Config}`, "no YAML": "{"} {
		if _, err := withTokenFile([]byte(broken)); err == nil {
			t.Errorf("%s was taken", name)
		}
	}
}
