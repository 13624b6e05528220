"""The page of a plan around its parts: styles for light and dark, no script, nothing from a network."""

from string import Template

PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root {
  color-scheme: light dark;
  --page: #ffffff; --ink: #1b1f24; --soft: #5b6470; --line: #e3e6ea; --card: #f7f8fa;
  --good: #1a7f37; --risky: #9a6700; --bad: #cf222e;
  --k0: #1f6feb; --k1: #c2570c; --k2: #8250df; --k3: #0a8a8a; --k4: #bf3989;
  --k5: #2da44e; --k6: #b08800; --k7: #6e7781; --k8: #8a5a44; --k9: #d1444f;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --ink: #e6e9ed; --soft: #98a2ae; --line: #2c323a; --card: #1b1f25;
    --good: #56d364; --risky: #e3b341; --bad: #ff7b72;
    --k0: #6cb0ff; --k1: #ffa657; --k2: #bc8cff; --k3: #4fd1d1; --k4: #ff8ac4;
    --k5: #56d364; --k6: #e3c75a; --k7: #a3adb8; --k8: #c69a80; --k9: #ff8d8d;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 76rem; padding: 2rem 1.25rem 4rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif;
}
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2.5rem 0 .75rem; overflow-wrap: anywhere; }
.headline { margin: .25rem 0 0; font-weight: 600; overflow-wrap: anywhere; }
.good { color: var(--good); } .risky { color: var(--risky); } .bad { color: var(--bad); }
.note, .versions { color: var(--soft); font-size: .85rem; }
figure { margin: 0; padding: .75rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--soft); font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .phase { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 3 3; }
svg .limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 6 4; }
svg .peak { fill: var(--ink); }
svg .idle { fill: var(--line); }
svg .box { stroke: var(--card); stroke-width: .5; }
svg text.mark { fill: var(--page); font-size: 10px; text-anchor: middle; }
.k0 { fill: var(--k0); } .k1 { fill: var(--k1); } .k2 { fill: var(--k2); } .k3 { fill: var(--k3); }
.k4 { fill: var(--k4); } .k5 { fill: var(--k5); } .k6 { fill: var(--k6); } .k7 { fill: var(--k7); }
.k8 { fill: var(--k8); } .k9 { fill: var(--k9); }
.keys { display: flex; flex-wrap: wrap; gap: .25rem 1.25rem; margin: .75rem 0 0; padding: 0; list-style: none; }
.keys svg { display: inline-block; width: .75rem; height: .75rem; margin-right: .4rem; vertical-align: -1px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem 0 .3rem 1rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 400; color: var(--soft); }
th:first-child, td:first-child { padding-left: 0; }
th.text, td.text { text-align: left; overflow-wrap: anywhere; }
.facts th { text-align: left; white-space: nowrap; padding-left: 0; }
.facts td { text-align: left; overflow-wrap: anywhere; width: 100%; }
.tree { font-variant-numeric: tabular-nums; }
.tree summary, .tree .leaf {
  display: grid; grid-template-columns: 1rem minmax(8rem, 1fr) 7rem 4.5rem 8rem; gap: .5rem; padding: .15rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere;
}
.tree summary { cursor: pointer; list-style: none; }
.tree summary::-webkit-details-marker { display: none; }
.tree summary::before { content: "+"; color: var(--soft); }
.tree details[open] > summary::before { content: "-"; }
.tree .leaf::before { content: ""; }
.tree details > details, .tree details > .leaf { margin-left: 1.25rem; }
.tree .number { text-align: right; } .tree .soft { text-align: right; color: var(--soft); }
li { overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>$name</h1>
<p class="headline $style">$headline</p>
$body
<p class="versions">$versions</p>
</body>
</html>
"""
)
