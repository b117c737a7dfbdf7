package reconcile_test

import (
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/federation/reconcile"
)

func TestEndings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		namespace := func(name string, deleted bool) *metav1.PartialObjectMetadata {
			o := &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{Name: name}}
			if deleted {
				o.DeletionTimestamp = new(metav1.Now())
			}
			return o
		}
		var e reconcile.Endings
		check := func(when, name string, want bool) {
			t.Helper()
			if e.Ended("a", name) != want {
				t.Errorf("%s: %s of a has ended: %t", when, name, !want)
			}
		}
		check("at first", "shop", false)
		e.Note("a", namespace("shop", false))
		check("while it is there", "shop", false)
		e.Note("a", namespace("shop", true))
		check("while it is deleted", "shop", true)
		check("at the same time", "other", false)
		if e.Ended("b", "shop") {
			t.Error("shop of b has ended with that of a")
		}
		e.Note("a", namespace("shop", false))
		check("when it is made again", "shop", false)
		e.Note("a", namespace("shop", true))
		time.Sleep(2 * time.Hour) //nolint:forbidigo // of synctest's clock
		e.Note("a", namespace("other", true))
		check("two hours later", "shop", false)
		check("then", "other", true)
	})
}
