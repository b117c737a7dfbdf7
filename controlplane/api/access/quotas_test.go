package access_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	isthmus "github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/tools/await"
)

// overQuota writes the status of the ClusterSetConfig as the quota controller does.
func (b *broker) overQuota(all ...isthmus.OverQuota) {
	b.t.Helper()
	config := &isthmus.ClusterSetConfig{}
	b.noError(b.admin.Get(b.t.Context(), client.ObjectKey{Namespace: b.namespace, Name: isthmus.ClusterSetConfigName}, config))
	config.Status.OverQuota = all
	b.noError(b.admin.Status().Update(b.t.Context(), config))
}

// A member that the status lists creates no more objects of the kinds that it has too many of, and the refusal says why. Its
// objects are updated and deleted as before, other kinds and other members are not affected, and it creates again when the
// status no longer lists it.
func TestQuotaPolicy(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	a, other := b.member("a"), b.member("a.b")
	objects := map[string]func(id, name string) client.Object{
		"record":    func(id, name string) client.Object { return b.record(id, name, "demo") },
		"slice":     func(id, name string) client.Object { return b.slice(id, name, "demo", "10.0.0.1") },
		"aggregate": func(id, name string) client.Object { return b.aggregate(name, "demo", id) },
	}
	for _, object := range objects {
		b.write(object("a", "old"))
	}
	for _, tc := range []struct {
		kind, setting string
		refuses       []string
	}{
		{"services", "services", []string{"record"}},
		{"ports", "ports", []string{"record"}},
		{"tombstones", "services", []string{"record"}},
		{"slices", "slices", []string{"slice"}},
		{"endpoints", "endpoints", []string{"slice"}},
		{"metadataBytes", "metadataBytes", []string{"record", "slice"}},
		{"storageBytes", "storageBytes", []string{"record", "slice"}},
		{"aggregates", "services", []string{"aggregate"}},
	} {
		b.overQuota(isthmus.OverQuota{Member: "a", Kind: tc.kind, Used: 12, Limit: 10, Since: metav1.Now()})
		because := "QuotaExceeded: member a has 12 " + tc.kind + " of at most 10 on the broker; unexport services, or raise spec.quotas." +
			tc.setting + " of the ClusterSetConfig on the broker; updates and deletions go on"
		await.NoError(b.t, tc.kind+" in force", func() error { return refused(b.dryRun(a, objects[tc.refuses[0]]("a", "new")), because) })
		for name, object := range objects {
			err := b.dryRun(a, object("a", "new"))
			if slices.Contains(tc.refuses, name) {
				err = refused(err, because)
			}
			if err != nil {
				t.Errorf("%s: a creates a new %s: %v", tc.kind, name, err)
			}
			if err := b.dryRun(other, object("a.b", "new")); err != nil {
				t.Errorf("%s: another member creates no %s: %v", tc.kind, name, err)
			}
			err = errors.Join(merge(object("a", "old"), `{"metadata":{"labels":{"app.kubernetes.io/managed-by":null}}}`)(t.Context(), a),
				a.Delete(t.Context(), object("a", "old"), client.DryRunAll))
			if err != nil {
				t.Errorf("%s: a no longer updates or deletes its %s: %v", tc.kind, name, err)
			}
		}
	}
	b.overQuota()
	await.NoError(b.t, "new objects", func() error {
		for name, object := range objects {
			if err := b.dryRun(a, object("a", "new")); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		return nil
	})
}

// A refusal names all quotas that a member exceeds.
func TestSeveralQuotas(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	b.overQuota(isthmus.OverQuota{Member: "a", Kind: "services", Used: 12, Limit: 10, Since: metav1.Now()}, isthmus.OverQuota{Member: "a", Kind: "ports", Used: 7, Limit: 5, Since: metav1.Now()})
	await.NoError(b.t, "the refusal", func() error {
		return refused(b.dryRun(b.member("a"), b.record("a", "new", "demo")), "member a has 12 services of at most 10 and 7 ports of at most 5 on the broker")
	})
}

// An aggregate of an older member has no author. Members with a newer controller change and delete it as before.
func TestAggregateWithoutAuthor(t *testing.T) {
	t.Parallel()
	b := newBroker(t)
	old := alter(b.aggregate("old", "demo", "a"), func(s *v1beta1.ServiceImport) { s.Annotations = nil })
	b.write(old)
	for _, do := range []attempt{
		update(b, old, func(s *v1beta1.ServiceImport) { s.Spec.Type = v1beta1.Headless }),
		mergeStatus(old, `{"status":{"clusters":[{"cluster":"a"}]}}`),
		remove(old),
	} {
		if err := do(t.Context(), b.member("a")); err != nil {
			t.Error(err)
		}
	}
}
