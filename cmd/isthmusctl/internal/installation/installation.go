package installation

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"time"

	"helm.sh/helm/v4/pkg/action"
	"helm.sh/helm/v4/pkg/kube"
	"helm.sh/helm/v4/pkg/release"
	"helm.sh/helm/v4/pkg/release/common"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage/driver"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apimeta "k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Errors of Open.
var (
	// ErrNotFound means that there is no Helm release of this name in the namespace.
	ErrNotFound = errors.New("no such Helm release")
	// ErrOther means that the Helm release is of another chart.
	ErrOther = errors.New("it is not a release of Isthmus")
)

// fieldManager is that of the program helm, which has applied the objects before and will again. Another one would be in conflict with it.
const fieldManager = "helm"

// chartName is the name of the chart.
const chartName = "isthmus"

// Installation is a Helm release of the chart.
type Installation struct {
	Name, Namespace string
	// Revision is the newest one.
	Revision int
	// Pending says why no command may change the release now, or is empty.
	Pending string
	config  *action.Configuration
	said    *bytes.Buffer // warnings of Helm
	cluster kubernetes.Interface
	objects []object // of the newest revision that worked
	history []*releasev1.Release
}

// Open reads a Helm release. Its driver is that of $HELM_DRIVER. It returns ErrNotFound if there is none, and ErrOther if it is of
// another chart.
func Open(cfg *rest.Config, namespace, name string) (*Installation, error) {
	i := &Installation{Name: name, Namespace: namespace, said: &bytes.Buffer{}}
	var err error
	if i.config, err = configuration(cfg, namespace, i.said); err != nil {
		return nil, err
	}
	if i.cluster, err = kubernetes.NewForConfig(cfg); err != nil {
		return nil, err
	}
	if err := i.readHistory(); err != nil {
		return nil, err
	}
	last := i.history[0]
	if last.Chart.Name() != chartName {
		return nil, fmt.Errorf("%w: %s in namespace %s is of chart %s; name another one with --release", ErrOther, name, namespace, last.Chart.Name())
	}
	i.Revision, i.Pending = last.Version, pending(last)
	base := last
	if at := slices.IndexFunc(i.history, worked); at >= 0 {
		base = i.history[at]
	}
	i.objects, err = split(base.Manifest)
	return i, err
}

// readHistory reads all revisions, the newest first.
func (i *Installation) readHistory() error {
	all, err := i.config.Releases.History(i.Name)
	if errors.Is(err, driver.ErrReleaseNotFound) || err == nil && len(all) == 0 {
		return fmt.Errorf("%w: %s in namespace %s", ErrNotFound, i.Name, i.Namespace)
	}
	if err != nil {
		return fmt.Errorf("read Helm release %s in namespace %s: %w", i.Name, i.Namespace, err)
	}
	for _, r := range all {
		have, err := v1(r)
		if err != nil {
			return err
		}
		i.history = append(i.history, have)
	}
	slices.SortFunc(i.history, func(a, b *releasev1.Release) int { return b.Version - a.Version })
	return nil
}

// worked reports whether a revision was installed without an error.
func worked(r *releasev1.Release) bool {
	return r.Info.Status == common.StatusDeployed || r.Info.Status == common.StatusSuperseded
}

// pending says why a release is in the middle of an operation, or returns "".
func pending(r *releasev1.Release) string {
	if !r.Info.Status.IsPending() {
		return ""
	}
	fix := fmt.Sprintf("helm rollback %s --namespace %s", r.Name, r.Namespace)
	if r.Info.Status == common.StatusPendingInstall {
		fix = fmt.Sprintf("helm uninstall %s --namespace %s, and install it again", r.Name, r.Namespace)
	}
	return fmt.Sprintf("revision %d of Helm release %s is in state %q: another command works on it, or was interrupted; in the latter case run %s", r.Version, r.Name, r.Info.Status, fix)
}

// configuration returns Helm's configuration for the cluster of cfg. Helm's warnings go to said.
func configuration(cfg *rest.Config, namespace string, said *bytes.Buffer) (*action.Configuration, error) {
	log := slog.NewTextHandler(said, &slog.HandlerOptions{Level: slog.LevelWarn})
	kube.ManagedFieldsManager = fieldManager
	c := action.NewConfiguration(action.ConfigurationSetLogger(log))
	return c, c.Init(newGetter(cfg, namespace), namespace, os.Getenv("HELM_DRIVER"))
}

// v1 returns a release in the format of Helm 3 and 4.
func v1(r release.Releaser) (*releasev1.Release, error) {
	have, ok := r.(*releasev1.Release)
	if !ok {
		return nil, fmt.Errorf("the Helm release has the unknown format %T", r)
	}
	return have, nil
}

// Versions returns the versions of the installed objects, sorted. They are several after an interrupted upgrade.
func (i *Installation) Versions() []string {
	var all []string
	for _, o := range i.objects {
		if v := o.GetLabels()[labelVersion]; v != "" && !slices.Contains(all, v) {
			all = append(all, v)
		}
	}
	slices.Sort(all)
	return all
}

// Running returns the versions of pods that are ready, each with the name of one of them. A DaemonSet with the updateStrategy OnDelete keeps
// pods of versions that the release no longer has.
func (i *Installation) Running(ctx context.Context) (map[string]string, error) {
	pods, err := i.cluster.CoreV1().Pods(i.Namespace).List(ctx, metav1.ListOptions{LabelSelector: labelPartOf + "=isthmus," + labelVersion})
	if err != nil {
		return nil, fmt.Errorf("list pods in namespace %s: %w", i.Namespace, err)
	}
	all := map[string]string{}
	for _, p := range pods.Items {
		if slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}) {
			all[p.Labels[labelVersion]] = p.Name
		}
	}
	return all, nil
}

// Before returns the newest revision that worked and is of another version, for `helm rollback`, or 0.
func (i *Installation) Before(version string) int {
	for _, r := range i.history {
		if worked(r) && r.Chart.AppVersion() != version {
			return r.Version
		}
	}
	return 0
}

// Uninstall removes the release, but objects that it is told to keep, and waits at most timeout until the others and their pods are gone.
// kept is Helm's text about what it left.
func (i *Installation) Uninstall(ctx context.Context, timeout time.Duration) (kept string, err error) {
	objects, err := i.config.KubeClient.Build(strings.NewReader(i.history[0].Manifest), false)
	if err != nil {
		return "", fmt.Errorf("read the objects of Helm release %s: %w", i.Name, err)
	}
	u := action.NewUninstall(i.config)
	u.WaitStrategy, u.Timeout = kube.HookOnlyStrategy, timeout
	u.DeletionPropagation = "foreground"
	result, err := u.Run(i.Name)
	if err != nil {
		return "", fmt.Errorf("uninstall Helm release %s: %w %s", i.Name, err, strings.TrimSpace(i.said.String()))
	}
	if err := awaitDeleted(ctx, objects, timeout); err != nil {
		return result.Info, fmt.Errorf("uninstalled Helm release %s, but not all of its objects are gone: %w", i.Name, err)
	}
	return result.Info, nil
}

// awaitDeleted waits until none of the objects is being deleted. Helm's own wait may end when it has heard of some of them only.
func awaitDeleted(ctx context.Context, objects kube.ResourceList, timeout time.Duration) error {
	var left []string
	err := wait.PollUntilContextTimeout(ctx, poll, timeout, true, func(context.Context) (bool, error) {
		left = nil
		for _, o := range objects {
			err := o.Get()
			switch meta, _ := apimeta.Accessor(o.Object); {
			case apierrors.IsNotFound(err):
			case err != nil:
				left = append(left, err.Error())
			case meta != nil && meta.GetDeletionTimestamp() != nil: // the others are kept, or are new
				left = append(left, o.Mapping.GroupVersionKind.Kind+" "+o.Name+" is being deleted")
			}
		}
		return len(left) == 0, nil
	})
	if err != nil {
		return errors.Join(fmt.Errorf("not so within %s: %s", timeout, strings.Join(left, ", ")), ctx.Err())
	}
	return nil
}
