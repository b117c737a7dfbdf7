package bystanders

import (
	"errors"
	"fmt"
	"strings"
	"time"

	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/mcs-api/pkg/apis/v1beta1"

	"github.com/isthmus-net/isthmus/controlplane/api/v1alpha1"
	"github.com/isthmus-net/isthmus/controlplane/clusterset"
	"github.com/isthmus-net/isthmus/tools/await"
)

// untold waits until the words of attacks are read in a refusal of an API server, a condition, an event, a problem of an agent or
// a log, so that the author or an administrator learns what is wrong. It returns the words that are not.
func (w *testbed) untold(attacks []attack, outcomes []outcome) error {
	limit := patience
	if w.expectHarm {
		limit = time.Second
	}
	var all strings.Builder
	return await.Poll(w.t.Context(), limit, func() error {
		text, err := w.told(outcomes)
		all.WriteString(text)
		for _, a := range attacks {
			for _, word := range a.says {
				if !strings.Contains(all.String(), word) {
					err = errors.Join(err, fmt.Errorf("%s: nothing tells %q; the end of all that is told:\n%s", a.name, word, text[max(0, len(text)-2000):]))
				}
			}
		}
		return err
	})
}

// told returns all refusals, conditions, events, problems and the log since the last call, a line each.
func (w *testbed) told(outcomes []outcome) (string, error) {
	var text strings.Builder
	text.WriteString(w.warnings.take())
	for _, o := range outcomes {
		switch {
		case o.refused != nil:
			fmt.Fprintf(&text, "refused: %v\n", o.refused)
		case o.GetKind() == v1beta1.ServiceImportKindName && o.Cluster != "":
			x, err := w.cluster(o.Cluster).plane.Explain(clusterset.ServiceName{Namespace: o.GetNamespace(), Name: o.GetName()})
			if err != nil {
				return "", err
			}
			if !x.Known { // isthmusctl explain then asks to check that Isthmus wrote the import
				fmt.Fprintf(&text, "explain: the agent of %s knows no import %s/%s\n", o.Cluster, o.GetNamespace(), o.GetName())
			}
		}
	}
	errs := []error{w.readEvents(&text, w.broker)}
	for _, c := range w.clusters {
		var exports v1beta1.ServiceExportList
		var imports v1beta1.ServiceImportList
		var members v1alpha1.MemberList
		ctx := w.t.Context()
		errs = append(errs, c.List(ctx, &exports), c.List(ctx, &imports), c.List(ctx, &members), w.readEvents(&text, c))
		for i := range exports.Items {
			conditions(&text, &exports.Items[i], exports.Items[i].Status.Conditions)
		}
		for i := range imports.Items {
			conditions(&text, &imports.Items[i], imports.Items[i].Status.Conditions)
		}
		for i := range members.Items {
			conditions(&text, &members.Items[i], members.Items[i].Status.Conditions)
		}
		for _, p := range c.plane.Status().Problems {
			fmt.Fprintf(&text, "problem of the agent of %s: %s\n", c.id, p)
		}
	}
	return text.String(), errors.Join(errs...)
}

func conditions(text *strings.Builder, of client.Object, all []metav1.Condition) {
	for _, c := range all {
		fmt.Fprintf(text, "%s/%s: %s=%s: %s: %s\n", of.GetNamespace(), of.GetName(), c.Type, c.Status, c.Reason, c.Message)
	}
}

func (w *testbed) readEvents(text *strings.Builder, c client.Client) error {
	var events eventsv1.EventList
	if err := c.List(w.t.Context(), &events); err != nil {
		return err
	}
	for i := range events.Items {
		e := &events.Items[i]
		fmt.Fprintf(text, "event of %s/%s: %s: %s\n", e.Regarding.Namespace, e.Regarding.Name, e.Reason, e.Note)
	}
	return nil
}

// silent returns which export that an API server accepted gets no condition.
func (w *testbed) silent(outcomes []outcome) error {
	for _, o := range outcomes {
		if o.refused == nil && o.GetKind() == v1beta1.ServiceExportKindName {
			err := await.Poll(w.t.Context(), patience, func() error {
				e := &v1beta1.ServiceExport{}
				if err := w.cluster(o.Cluster).mirror.Get(w.t.Context(), client.ObjectKeyFromObject(o), e); err != nil {
					return err
				}
				if len(e.Status.Conditions) == 0 {
					return errors.New("no condition")
				}
				return nil
			})
			if err != nil {
				return fmt.Errorf("%s: %w", o.Object, err)
			}
		}
	}
	return nil
}
