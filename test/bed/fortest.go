// SPDX-License-Identifier: Apache-2.0

package bed

import "testing"

// ForTest makes a bed and closes it at the end of the test, when the cleanups that the test has registered since are done.
// If the test has failed, it logs the output of the bed's processes. A bed that cannot be made fails the test at once;
// one that leaves something behind fails it too.
func ForTest(tb testing.TB, opts Options) *Bed {
	tb.Helper()
	b, err := New(opts)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		b.mu.Lock()
		procs := b.procs
		b.mu.Unlock()
		err := b.Close()
		if err != nil {
			tb.Error(err)
		}
		if tb.Failed() {
			for _, p := range procs {
				tb.Logf("%s (pid %d) wrote:\n%s", p.Name, p.Pid, p.Output())
			}
		}
	})
	return b
}
