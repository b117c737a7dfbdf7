package documents

import (
	"slices"
	"testing"
)

func TestParse(t *testing.T) {
	t.Parallel()
	have, err := parse("# Title\n\n## One\n\n1. Say\n\n   ```sh\n   a \\\n     b\n   # no heading\n   ```\n\n```yaml\nno: command\n```\n## Two\n```sh\nc\n```\n```\nd\n```\n")
	want := []Block{{"One", "sh", "a \\\n  b\n# no heading\n"}, {"One", "yaml", "no: command\n"}, {"Two", "sh", "c\n"}, {"Two", "", "d\n"}}
	if err != nil || !slices.Equal(have, want) {
		t.Errorf("%q, %v; want %q", have, err, want)
	}
	if all := Commands(have, "One"); len(all) != 1 || all[0] != want[0].Text {
		t.Errorf("commands: %q", all)
	}
	if all, err := parse("## One\n```sh\na\n"); err == nil || err.Error() != `the code below "One" has no end` {
		t.Errorf("%q, %v", all, err)
	}
}
