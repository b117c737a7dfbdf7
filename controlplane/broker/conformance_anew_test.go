package broker_test

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/tools/conformance"
)

// A Service that is unexported everywhere, and exported again with another choice after its import is gone, gets the
// new choice.
func TestReexportGetsANewChoice(t *testing.T) {
	w := newTestbed(t).run()
	for i := range 10 {
		name := fmt.Sprint("hello-", i)
		w.a.service(name)
		w.b.service(name)
		for _, m := range w.both() {
			m.exportWith(name, "true")
		}
		w.b.wants(name, onBoth)
		w.a.wants(name, onBoth)
		for _, m := range w.both() {
			m.unexport(name)
		}
		w.b.wantsNone(name)
		w.a.wantsNone(name)
		w.a.exportWith(name, "false")
		w.a.condition(name, "Ready", metav1.ConditionTrue, "Exported")
		w.a.condition(name, "Conflict", metav1.ConditionFalse, "NoConflicts")
	}
	conformance.Holds(t, "V26")
}
