package admission_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/go-logr/logr"
	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	ctrllog "sigs.k8s.io/controller-runtime/pkg/log"

	federationv1alpha1 "github.com/isthmus-net/isthmus/controlplane/api/federation/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/federation/admission"
	"github.com/isthmus-net/isthmus/tools/apitest"
	"github.com/isthmus-net/isthmus/tools/await"
	"github.com/isthmus-net/isthmus/tools/conformance"
)

var server apitest.Server

func TestMain(m *testing.M) {
	ctrllog.SetLogger(logr.Discard())
	os.Exit(apitest.Run(m, &server))
}

// The policy follows the Federation: without one, with one that lists the id, and with one without members.
func TestReferredClaimCannotChange(t *testing.T) {
	ctx := t.Context()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{federationv1alpha1.AddToScheme, admissionv1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	c, err := client.New(server.Config(t), client.Options{Scheme: scheme})
	if err != nil {
		t.Fatal(err)
	}
	claim := &federationv1alpha1.ClusterClaim{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.ClaimID}, Spec: federationv1alpha1.ClusterClaimSpec{Name: federationv1alpha1.ClaimID, Value: "east"}}
	federation := &federationv1alpha1.Federation{ObjectMeta: metav1.ObjectMeta{Name: federationv1alpha1.FederationName}, Spec: federationv1alpha1.FederationSpec{ClusterSet: "green"}}
	for _, obj := range append(admission.Claims(), claim, federation) {
		if err := c.Create(ctx, obj); err != nil {
			t.Fatal(err)
		}
	}
	change := func(value string) func(context.Context) error {
		return func(ctx context.Context) error {
			changed := claim.DeepCopy()
			changed.Spec.Value = value
			return c.Update(ctx, changed, client.DryRunAll)
		}
	}
	remove := func(ctx context.Context) error { return c.Delete(ctx, claim.DeepCopy(), client.DryRunAll) }
	removeAll := func(ctx context.Context) error {
		return c.DeleteAllOf(ctx, &federationv1alpha1.ClusterClaim{}, client.DryRunAll)
	}
	refused := func(what string, want bool, try func(context.Context) error) {
		t.Helper()
		// The API server learns of policies and of their parameters a moment later.
		await.NoError(t, fmt.Sprintf("%s, refused: %v", what, want), func() error {
			err := try(ctx)
			if !want {
				return err
			}
			if !apierrors.IsInvalid(err) {
				return fmt.Errorf("no refusal: %w", err)
			}
			return nil
		})
	}
	refused("another id, in a cluster without members", true, change("west"))
	refused("no id, in a cluster without members", true, remove)
	refused("no claims at all, in a cluster without members", true, removeAll)
	refused("the same id", false, change("east"))

	member := func(id string) []federationv1alpha1.MemberCluster {
		return []federationv1alpha1.MemberCluster{{ClusterID: id, Server: "https://192.0.2.1", Secret: "s"}}
	}
	federation.Spec.Members = member("north")
	if err := c.Update(ctx, federation); err != nil {
		t.Fatal(err)
	}
	refused("another id, of a cluster that is no member", false, change("west"))
	federation.Spec.Members = member("east")
	if err := c.Update(ctx, federation); err != nil {
		t.Fatal(err)
	}
	refused("another id, of a member", true, change("west"))
	refused("no claims at all, of a member", true, removeAll)
	if err := c.Delete(ctx, federation); err != nil {
		t.Fatal(err)
	}
	refused("no id, without a Federation", false, remove)
	refused("no claims at all, without a Federation", false, removeAll)
	conformance.Holds(t, "F2")
}
