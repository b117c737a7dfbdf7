package export

import (
	"errors"
	"testing"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/isthmus-net/isthmus/controlplane/broker/internal/statement"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
)

func TestStated(t *testing.T) {
	name := func(n string) clusterset.ServiceName {
		return clusterset.ServiceName{Namespace: "demo", Name: n}
	}
	slice := func(n string) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Name: n}}
	}
	var want statement.Statement
	var s stated
	says := func(what string, complete bool, exports ...clusterset.ServiceName) {
		t.Helper()
		have, ok := s.sum(exports)
		if ok != complete || ok && have != want {
			t.Errorf("%s: the statement is %s, complete %t, want %s, %t", what, have, ok, want, complete)
		}
	}
	says("no export", true)
	says("an export that was not handled", false, name("web"))
	s.published(name("web"), []*discoveryv1.EndpointSlice{slice("web-1"), slice("web-2")}, nil)
	want.AddExport(name("web"))
	want.AddSlice(name("web"), "web-1")
	want.AddSlice(name("web"), "web-2")
	says("one", true, name("web"))
	s.setInvalid(name("bad"))
	says("an invalid one too", true, name("web"), name("bad"))
	s.published(name("web"), []*discoveryv1.EndpointSlice{slice("web-2")}, nil)
	want.RemoveSlice(name("web"), "web-1")
	says("with fewer slices", true, name("web"), name("bad"))
	says("not withdrawn yet", true, name("bad"))
	s.forget(name("web"))
	want = statement.Statement{}
	says("withdrawn", true, name("bad"))
	s.published(name("web"), nil, errors.New("refused"))
	says("published, but nobody knows what", false, name("web"), name("bad"))
}

func TestRefusedServicesAreCounted(t *testing.T) {
	var s stated
	web, db := clusterset.ServiceName{Namespace: "demo", Name: "web"}, clusterset.ServiceName{Namespace: "demo", Name: "db"}
	for i, step := range []struct {
		do   func()
		want int
	}{
		{func() { s.setRefused(web, false) }, 0},
		{func() { s.setRefused(web, true); s.setRefused(db, true); s.setRefused(web, true) }, 2},
		{func() { s.setRefused(db, false) }, 1},
		{func() { s.setInvalid(web) }, 0},
	} {
		if step.do(); s.countRefused() != step.want {
			t.Errorf("step %d: %d Services are refused, want %d", i, s.countRefused(), step.want)
		}
	}
}
