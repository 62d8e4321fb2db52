"""Word lists that the checks of instructions compare with: English function words, frequent verbs, names, places."""

from __future__ import annotations

STOP_WORDS = frozenset(
    """
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it its
    itself they them their theirs themselves what which who whom this that these those am is are was were be been being have
    has had having do does did doing a an the and but if or because as until while of at by for with about against between
    into through during before after above below to from up down in out on off over under again further then once here there
    when where why how all any both each few more most other some such no nor not only own same so than too very s t can will
    just don should now d ll m o re ve y ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn
    wasn weren won wouldn don't should've aren't couldn't didn't doesn't hadn't hasn't haven't isn't mightn't mustn't needn't
    shan't shouldn't wasn't weren't won't wouldn't you're you've you'll you'd she's it's that'll i'm i've i'll i'd he's we're
    they're
    """.split()
)

PRONOUNS = frozenset(
    """
    i me my mine myself we us our ours ourselves you your yours yourself yourselves he him his himself she her hers herself it
    its itself they them their theirs themselves who whom whose which what this that these those anybody anyone anything
    everybody everyone everything nobody nothing somebody someone something each either neither one another both few many
    several all any most none some other others such whoever whomever whatever whichever
    """.split()
)

CONJUNCTIONS = frozenset("for and nor but or yet so".split())

MINOR_WORDS = frozenset(
    "a an the and but or nor for so yet of in on at to by up as off per via with from into onto over than if vs".split()
)
"""Words that title case leaves in lower case, unless they come first."""

PERSON_NAMES = frozenset(
    """
    Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper Leo Zoe
    Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah Layla Nicholas
    Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan
    """.split()
)

VERBS = frozenset(
    """
    accept access achieve acknowledge act adapt add adjust admit adopt advise agree aim align allow alter analyze analyse answer
    apply appreciate approach approve argue arrange ask assemble assert assess assign assist assume assure attack attempt
    attend avoid awaken balance be become begin behold believe bend bet bind blend boil boost borrow break breathe bring build
    burn buy calculate call carry catch celebrate challenge change check choose clarify clean clear click climb close collect
    combine come commit compare compile complete compose compute concentrate conclude conduct confirm connect consider consist
    construct consult contact contain continue contribute control convert convince cook copy correct count cover craft create
    cultivate cut dance decide declare dedicate deepen define deliver demand demonstrate deny depend derive describe design
    determine develop differ dig direct discover discuss display dive divide do document doubt draft draw dream drink drive drop
    earn eat edit eliminate embark embrace emerge emphasize employ empower enable encourage end endure engage enhance enjoy
    ensure enter envision escape establish estimate evaluate evolve examine execute exercise exist expand expect experience
    experiment explain explore express extend extract face fall feel fight fill find finish fix focus follow forget form
    formulate foster gain gather generate get give go grab grasp grow guess guide handle happen hear heat help hold hope
    highlight identify ignore illustrate imagine implement improve include incorporate increase indicate inform initialize
    initiate insert inspect inspire install integrate introduce invest investigate invite involve join judge jump keep know
    launch lead learn leave lend let leverage lie lift light like limit link list listen live locate log look lose love
    maintain make manage map mark master match matter mean measure meet mention mix modify monitor move navigate need note
    notice observe obtain offer open optimize order organize outline overcome own pay perform permit pick picture place plan
    play point ponder pour practice predict prefer prepare present preserve press prevent prioritize proceed process produce
    promote propose protect prove provide pull purchase pursue push put question raise reach read realize recall receive
    recognize recommend record reduce refer reflect regard reject relate relax release rely remain remember remove rename
    repeat replace report represent request require research resolve respect respond rest return reveal review revise rise run
    save say schedule search see seek seem select sell send serve set shape share shift show shut simplify sing sit sketch
    sleep slice solve sort speak specify spend stand start state stay step stop store strengthen strike strive study submit
    substitute succeed suggest suit summarize supply support suppose survive swim switch take talk target teach tell test
    thank think thrive throw touch track train transform translate travel treat trust try turn uncover understand unlock
    unveil update upgrade use utilize validate verify view visit visualize wait wake walk want warn wash watch wear weigh
    welcome win wish witness wonder work worry wrap write
    """.split()
)

IRREGULAR_VERB_FORMS = frozenset(
    """
    is are was were am been being has had having does did done went gone made said saw seen took taken came knew known got gave
    given found thought told became left felt brought began begun kept held wrote written stood heard meant met ran paid sat
    spoke spoken led grew grown lost fell fallen sent built understood drew drawn broke broken spent rose risen drove driven
    bought wore worn chose chosen ate eaten slept won taught caught fought sold sang sung swam swum threw thrown can could may
    might must shall should will would
    """.split()
)

EUROPEAN_CAPITALS_NORTH_OF_45 = (
    ("reykjavik",), ("helsinki",), ("oslo",), ("tallinn",), ("stockholm",), ("riga",), ("moscow",), ("copenhagen",),
    ("vilnius",), ("minsk",), ("dublin",), ("berlin",), ("amsterdam",), ("warsaw",), ("london",), ("brussels",),
    ("kyiv", "kiev"), ("prague",), ("luxembourg", "luxembourg city"), ("paris",), ("vienna",), ("bratislava",),
    ("budapest",), ("vaduz",), ("chisinau",), ("bern", "berne"), ("ljubljana",), ("zagreb",),
)  # fmt: skip
"""From north to south, with other spellings; accents removed."""

AFRICAN_COUNTRIES = (
    ("algeria",), ("angola",), ("benin",), ("botswana",), ("burkina faso",), ("burundi",), ("cabo verde", "cape verde"),
    ("cameroon",), ("central african republic",), ("chad",), ("comoros",),
    ("congo", "republic of the congo", "congo republic of the", "congo-brazzaville", "congo brazzaville"),
    ("democratic republic of the congo", "dr congo", "congo democratic republic of the", "congo-kinshasa", "drc"),
    ("djibouti",), ("egypt",), ("equatorial guinea",), ("eritrea",), ("eswatini", "swaziland"), ("ethiopia",), ("gabon",),
    ("gambia", "the gambia"), ("ghana",), ("guinea",), ("guinea-bissau",), ("ivory coast", "cote d'ivoire"), ("kenya",),
    ("lesotho",), ("liberia",), ("libya",), ("madagascar",), ("malawi",), ("mali",), ("mauritania",), ("mauritius",),
    ("morocco",), ("mozambique",), ("namibia",), ("niger",), ("nigeria",), ("rwanda",),
    ("sao tome and principe",), ("senegal",), ("seychelles",), ("sierra leone",), ("somalia",), ("south africa",),
    ("south sudan",), ("sudan",), ("tanzania",), ("togo",), ("tunisia",), ("uganda",), ("zambia",), ("zimbabwe",),
)  # fmt: skip
