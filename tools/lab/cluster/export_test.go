package cluster

// For the tests in package cluster_test.
const (
	NodeInotify         = nodeInotify
	ControlPlaneInotify = controlPlaneInotify
)

var RequireInotify = requireInotify

func (l *Lab) InotifyNeed() int { return l.inotifyNeed() }
